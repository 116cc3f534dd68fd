"""Small mixture-of-experts layers of every kind, for the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ROUNDOFF

from multigemm import _dispatch
from multigemm.moe import MoEConfig, MoEFeedForward

NAMES = ("multigemm_native_moe", "multigemm_moe", "pytorch_multi_gemm_moe")
SMALL: dict[str, Any] = {"hidden_size": 6, "intermediate_size": 5, "num_experts": 8, "top_k": 3}

VARIANTS: dict[str, dict[str, Any]] = {
    **{a: {"activation": a} for a in ("swiglu", "geglu", "reglu", "silu", "gelu", "relu")},
    "geglu tanh": {"activation": "geglu", "gelu_approximate": "tanh"},
    "gpt-oss": {
        "activation": "clamped_swiglu", "clamp_limit": 0.25, "expert_bias": True, "router_bias": True,
    },
    "interleaved": {
        "gate_up_layout": "interleaved", "activation": "clamped_swiglu", "clamp_limit": 0.25,
        "expert_bias": True, "shared_intermediate_size": 3,
    },
    "as it comes": {"renormalize": False},
    "bias, plain": {"activation": "relu", "expert_bias": True},
    "deepseek-v2": {
        "num_expert_groups": 4, "top_k_groups": 2, "group_score": "max", "renormalize": False,
        "routed_scaling_factor": 16.0, "shared_intermediate_size": 4,
    },
    "deepseek-v3": {
        "score_function": "sigmoid", "score_correction_bias": True, "num_expert_groups": 4, "top_k_groups": 2,
        "routed_scaling_factor": 2.5, "shared_intermediate_size": 3,
    },
    "qwen2-moe": {"shared_intermediate_size": 7, "shared_gate": True, "renormalize": False},
    "shared, plain": {"activation": "gelu", "shared_intermediate_size": 3},
    "top 1": {"top_k": 1},
    "top 16": {"top_k": 16, "num_experts": 16},
    "all experts": {"top_k": 8},
    "recompute": {"recompute": True, "expert_bias": True},
}  # fmt: skip


def skip_unless_there(name: str, device: torch.device) -> None:
    """The native layer's kernels are a backend's; without one the others are tested alone."""
    if name != "multigemm_native_moe":
        return
    try:
        there = _dispatch.backend_for(device.type) is not None
    except ImportError:
        there = False
    if not there:
        pytest.skip(f"no native backend serves {device.type}")


def make(
    settings: dict[str, Any], name: str | None, device: torch.device, dtype: torch.dtype = torch.float64
) -> MoEFeedForward:
    torch.manual_seed(0)
    layer = MoEFeedForward(MoEConfig(**settings, input_dtype=dtype), implementation=name, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
        if layer.score_correction_bias is not None:
            layer.score_correction_bias.uniform_(-0.5, 0.5)
    return layer


def tensors(layer: MoEFeedForward, grad: bool = False) -> dict[str, torch.Tensor]:
    """The layer's tensors in float64 on the CPU, for the oracle."""
    found = {n: t.detach().cpu().double() for n, t in layer.state_dict().items()}
    return {n: t.requires_grad_(grad and n != "score_correction_bias") for n, t in found.items()}


def tokens(count: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        device, dtype
    )


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 64) -> None:
    """Within ``factor`` roundings of the largest value."""
    assert actual.shape == expected.shape
    bound = factor * ROUNDOFF[dtype] * max(expected.abs().max().item(), 1e-2)
    error = (actual.detach().cpu().double() - expected.detach()).abs().max().item()
    assert error <= bound, f"error {error:.3e} above {bound:.3e}"
