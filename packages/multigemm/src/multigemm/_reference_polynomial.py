"""``indexed_polynomial`` and its two gradients in readable torch: the specification, and the fallback.

Terms are taken a few at a time, so that no temporary passes some tens of megabytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

_MOST = 1 << 22
"""Elements of one temporary."""


def run(
    kind: str,
    x: torch.Tensor,
    directions: list[torch.Tensor],
    w: torch.Tensor | None,
    gy: torch.Tensor | None,
    p: Any,
    out: torch.Tensor,
) -> None:
    """Write all of ``out``: y [N, O C] ("value"), the gradient [N, D C] ("xgrad") or [G, P, C] ("wgrad")."""
    out.zero_()
    channels = (x.shape[1] + (out if kind == "value" else gy).shape[1]) // max(p.places.shape[0], 1)  # type: ignore[union-attr]  # there
    width = x.shape[1] // channels if channels else 0
    groups = (out if w is None else w).shape[0]
    if out.numel() == 0 or x.shape[0] == 0 or groups == 0:
        return
    indices = _indices(p)
    columns = p.places[:, :1] + p.places[:, 1:] * torch.arange(channels, device=x.device)
    factors = [_extended(x, columns[:width], 1.0)]
    factors += [_extended(v, columns[:width], 0.0) for v in directions]
    known = (p.labels >= 0) & (p.labels < groups)
    label = torch.where(known, p.labels, 0)
    sums = _sums(kind, out, columns, width)
    if gy is not None:
        gy = gy[:, columns[width:]] * known[:, None, None]  # [N, O, C]
    step = max(1, _MOST // max(1, x.shape[0] * channels))
    for first in range(0, indices.shape[0], step):
        d, *factor = indices[first : first + step].unbind(1)
        chosen = p.last[first : first + step, 1].long()
        scale = p.factors[first : first + step, None]
        weights: Any = None  # [N, t, C]
        if w is not None:
            weights = w.index_select(1, chosen)[label] * known[:, None, None] * scale
        if kind == "value":
            sums.index_add_(1, d, weights * _derivative(factors, factor))
        elif kind == "wgrad":
            terms = _derivative(factors, factor) * gy.index_select(1, d)  # type: ignore[union-attr]  # there
            one_hot = torch.nn.functional.one_hot(label, groups).T.to(terms.dtype)
            out.index_add_(1, chosen, (one_hot @ terms.flatten(1)).view(groups, -1, channels) * scale)
        else:
            common = weights * gy.index_select(1, d)  # type: ignore[union-attr]  # there
            for slot in range(3):
                rest = factor[:slot] + factor[slot + 1 :]
                sums.index_add_(1, factor[slot], common * _derivative(factors, rest))
    if kind == "value":
        out[:, columns[width:]] = sums
    elif kind == "xgrad":
        out[:, columns[:width]] = sums[:, :width]


def _indices(p: Any) -> torch.Tensor:
    """[T, 4]: d, i, j, k of each term."""
    term = torch.arange(p.last.shape[0], device=p.last.device)
    pair = torch.searchsorted(p.pairs[:, 2].contiguous(), term, right=True)
    head = torch.searchsorted(p.heads[:, 3].contiguous(), pair, right=True)
    return torch.stack([p.heads[head, 0], p.heads[head, 1], p.pairs[pair, 0], p.last[:, 0]], 1).long()


def _extended(t: torch.Tensor, columns: torch.Tensor, constant: float) -> torch.Tensor:
    """[N, D C] -> [N, D + 1, C], the last a constant."""
    values = t[:, columns]
    return torch.cat([values, values.new_full((t.shape[0], 1, columns.shape[1]), constant)], 1)


def _sums(kind: str, out: torch.Tensor, columns: torch.Tensor, width: int) -> torch.Tensor:
    rows = columns.shape[0] - width if kind == "value" else width + 1
    return out.new_zeros(out.shape[0], rows, columns.shape[1])


def _derivative(factors: list[torch.Tensor], indices: list[torch.Tensor]) -> torch.Tensor:
    """[N, t, C]: the product of the factors, differentiated once along each direction."""
    total = factors[0].new_zeros(())
    for product in _products(factors, indices):
        total = total + product
    return total.expand(factors[0].shape[0], indices[0].shape[0], factors[0].shape[2])


def _products(factors: list[torch.Tensor], indices: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for slots in itertools.permutations(range(len(indices)), len(factors) - 1):
        product = None
        for slot, index in enumerate(indices):
            which = slots.index(slot) + 1 if slot in slots else 0
            factor = factors[which].index_select(1, index)
            product = factor if product is None else product * factor
        if product is not None:
            yield product
