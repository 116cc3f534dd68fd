"""The mixture-of-experts layer in float64, token by token, written without the package.

Every step is differentiable, so that gradients can be compared as well. ``settings`` are the fields of a
configuration as a plain dict.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def activation(h: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """One token's h -> its hidden vector. erf and exp are spelled out."""
    kind = settings.get("activation", "swiglu")

    def gelu(t: torch.Tensor) -> torch.Tensor:
        if settings.get("gelu_approximate") == "tanh":
            return 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))
        return 0.5 * t * (1 + torch.erf(t / math.sqrt(2)))

    plain = {"silu": lambda t: t / (1 + torch.exp(-t)), "gelu": gelu, "relu": lambda t: t * (t > 0)}
    if kind in plain:
        return plain[kind](h)
    half = h.shape[0] // 2
    gate, up = h[:half], h[half:]
    if settings.get("gate_up_layout") == "interleaved":
        gate, up = h.view(half, 2).T
    if kind == "clamped_swiglu":
        alpha, limit = settings.get("clamp_alpha", 1.702), settings.get("clamp_limit", 7.0)
        gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
        up = torch.where(up > limit, torch.full_like(up, limit), up)
        up = torch.where(up < -limit, torch.full_like(up, -limit), up)
        return (up + 1) * gate / (1 + torch.exp(-alpha * gate))
    return plain[{"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}[kind]](gate) * up


def route(
    logits: torch.Tensor, settings: dict[str, Any], bias: torch.Tensor | None = None
) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """logits [T, E] in float64 -> experts and weights of each token, best first."""
    k, groups = settings["top_k"], settings.get("num_expert_groups", 1)
    experts, weights = [], []
    for row in logits:
        if settings.get("score_function", "softmax") == "softmax":
            exps = torch.exp(row - row.max().detach())
            scores = exps / exps.sum()
        else:
            scores = 1 / (1 + torch.exp(-row))
        rank = [s.item() + (0.0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
        allowed = list(range(len(rank)))
        if groups > 1:
            size = len(rank) // groups
            blocks = [sorted(rank[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
            taken = 1 if settings.get("group_score") == "max" else 2
            best = sorted(range(groups), key=lambda g: -sum(blocks[g][:taken]))
            allowed = [e for g in best[: settings["top_k_groups"]] for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -rank[e])[:k]
        picked = [scores[e] for e in chosen]
        if settings.get("renormalize", True):
            total = sum(picked)
            picked = [p / total for p in picked]
        experts.append(chosen)
        weights.append([p * settings.get("routed_scaling_factor", 1.0) for p in picked])
    return experts, weights


def feed_forward(
    x: torch.Tensor,
    w: dict[str, torch.Tensor],
    settings: dict[str, Any],
    experts: list[list[int]] | None = None,
    weights: Any = None,
) -> torch.Tensor:
    """x [T, H] and the layer's tensors by name, all float64 -> y [T, H]."""
    if experts is None:
        logits = x @ w["router.weight"].T + w.get("router.bias", torch.zeros(()))
        experts, weights = route(logits, settings, w.get("score_correction_bias"))
    result = []
    for t in range(x.shape[0]):
        y = torch.zeros(x.shape[1], dtype=torch.float64)
        for e, p in zip(experts[t], weights[t], strict=True):
            if not 0 <= e < settings["num_experts"]:
                continue
            h = x[t] @ w["gate_up_proj"][e]
            if "gate_up_proj_bias" in w:
                h = h + w["gate_up_proj_bias"][e]
            out = activation(h, settings) @ w["down_proj"][e]
            if "down_proj_bias" in w:
                out = out + w["down_proj_bias"][e]
            y = y + p * out
        if "shared_gate_up_proj" in w:
            s = activation(x[t] @ w["shared_gate_up_proj"], settings) @ w["shared_down_proj"]
            if "shared_gate" in w:
                s = s / (1 + torch.exp(-(x[t] @ w["shared_gate"])))
            y = y + s
        result.append(y)
    return torch.stack(result) if result else x * 0
