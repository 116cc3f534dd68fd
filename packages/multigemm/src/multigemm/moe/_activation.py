"""The activations of an expert: of gate and up where gated, of one input otherwise.

    swiglu  silu(gate) * up        geglu  gelu(gate) * up        reglu  relu(gate) * up
    clamped_swiglu  (u + 1) * g * sigmoid(alpha * g),  g = min(gate, limit), u = clamp(up, -limit, limit)

The first three are from "GLU Variants Improve Transformer" (arXiv:2002.05202, section 2); the last is that
of gpt-oss, with alpha 1.702 and limit 7 (its reference implementation, ``swiglu`` in torch/model.py).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ._config import MoEConfig


def activate(h: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """h [N, 2 I], the columns as ``config.gate_up_layout`` has them, or [N, I] where the activation is
    plain -> [N, I]. Zero at zero."""
    kind = config.activation
    if not config.gated:
        return _plain(h, kind, config)
    if config.gate_up_layout == "interleaved":
        gate, up = h[..., ::2], h[..., 1::2]
    else:
        gate, up = h.chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=config.clamp_limit)
        up = up.clamp(min=-config.clamp_limit, max=config.clamp_limit)
        return (up + 1) * (gate * torch.sigmoid(gate * config.clamp_alpha))
    return _plain(gate, {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}[kind], config) * up


def _plain(h: torch.Tensor, kind: str, config: MoEConfig) -> torch.Tensor:
    if kind == "silu":
        return F.silu(h)
    if kind == "gelu":
        return F.gelu(h, approximate=config.gelu_approximate)
    return F.relu(h)
