"""Experts as torchtitan keeps them: three weights, and tokens in expert order with a count for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops import grouped_mm

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sorted_experts(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    counts: torch.Tensor,
    gate: Gate,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``gate(x @ w1[e]^T, x @ w3[e]^T) @ w2[e]^T`` of rows in expert order.

    x [N, D]; w1 and w3 [E, F, D], w2 [E, D, F], in the order w1, w2, w3, plain tensors or local shards of
    DTensors; counts [E] rows of each expert. Computed in ``dtype``. -> [N, D] of x's dtype; rows past the sum
    of the counts are zeros.
    """
    w1, w2, w3 = (local(w).to(dtype).mT for w in weights)
    sizes = counts if not counts.is_floating_point() else counts.to(torch.int64)
    rows = x.to(dtype)
    h = gate(grouped_mm(rows, w1, sizes), grouped_mm(rows, w3, sizes))
    return grouped_mm(h, w2, sizes).to(x.dtype)


def local(parameter: Any) -> torch.Tensor:
    """A parameter as a plain tensor: of a DTensor, this process's shard."""
    to_local = getattr(parameter, "to_local", None)
    result: torch.Tensor = parameter if to_local is None else to_local()
    return result
