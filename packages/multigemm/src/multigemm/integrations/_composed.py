"""Experts with any activation: what a framework's module computes by itself, on grouped products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..moe import Routing
from ..moe._permutation import combine, spread
from ..ops import grouped_mm, sort_by_group

Map = Callable[[torch.Tensor], torch.Tensor]


def composed_experts(
    x: torch.Tensor,
    routing: Routing,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    activation: Map,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm: Map | None = None,
) -> torch.Tensor:
    """Compute ``y[t] = sum over j of weights[t, j] * norm(E_e(x[t]))``, e = experts[t, j], with
    ``E_e(x) = activation(x @ up_proj[e] + up_bias[e]) @ down_proj[e] + down_bias[e]``.

    x [T, H], routing of [T, k], up_proj [E, H, W], down_proj [E, I, H], biases [E, W] and [E, H];
    ``activation`` maps [R, W] to [R, I] and ``norm`` [R, H] to itself, row by row. A slot whose expert is
    outside 0 .. E - 1 adds zeros. -> [T, H].
    """
    count, k = up_proj.shape[0], routing.experts.shape[1]
    order = sort_by_group(routing.experts.reshape(-1), count)
    h = activation(grouped_mm(spread(x, order, k), up_proj, order.group_sizes, bias=up_bias))
    rows = grouped_mm(h, down_proj, order.group_sizes, bias=down_bias)
    kept = (routing.experts >= 0) & (routing.experts < count)
    if norm is not None:  # of a row of zeros it may be anything
        real = kept.reshape(-1, 1).index_select(0, order.permutation)
        rows = norm(rows).masked_fill(~real, 0)
    return combine(rows, routing.weights.masked_fill(~kept, 0), order, rows.dtype)
