"""Operands of the operators around the products of a layer, and what their results are compared by."""

from __future__ import annotations

import torch
from oracle import ROUNDOFF

from multigemm.moe import _composed
from multigemm.moe._composed import Activation, Places

ops = torch.ops.multigemm
KINDS = {
    **{f"gated {kind}": Activation(kind, True, False, 1.702, 0.5) for kind in range(5)},
    "clamped, interleaved": Activation(_composed.CLAMPED, True, True, 1.702, 0.5),
    "silu, interleaved": Activation(_composed.SILU, True, True, 1.702, 0.5),
    **{f"plain {kind}": Activation(kind, False, False, 1.702, 0.5) for kind in range(4)},
}


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(
        device, dtype
    )


def places_of(tokens: int, k: int, experts: int, device: torch.device) -> Places:
    """With dropped slots, and experts without any."""
    found = torch.randint(-1, experts, (tokens, k), generator=torch.Generator().manual_seed(1))
    found[found == experts // 2] = experts + 3
    return Places(*ops.moe_order(found.to(device), experts), k)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 8) -> None:
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    error = (actual.detach().double().cpu() - expected.detach().double().cpu()).abs().max().item()
    bound = factor * ROUNDOFF[dtype] * max(expected.abs().max().item(), 0.1)
    assert error <= bound, f"error {error:.3e} above {bound:.3e}"
