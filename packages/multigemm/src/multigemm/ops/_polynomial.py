"""The tables of ``indexed_polynomial``, and its batching rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._errors import DeviceError, DTypeError, ShapeError
from . import _vmap


class Polynomial(NamedTuple):
    """The rows' labels and the tables of the terms, as every operator takes them."""

    labels: torch.Tensor
    """[N] int64; one outside 0 .. G-1 gives zeros."""
    permutation: torch.Tensor | None
    """[N] int64 and, beside it, [G] group sizes: the ``sort_by_group`` of the labels, or made."""
    group_sizes: torch.Tensor | None
    heads: torch.Tensor
    """[H, 4] int32, sorted: d, i, and the range of its pairs."""
    pairs: torch.Tensor
    """[Q, 4] int32: j, the range of its terms, and d."""
    last: torch.Tensor
    """[T, 2] int32: k of each term, and which of the label's weights it has."""
    factors: torch.Tensor
    """[T] of the dtype of x: what the weight is multiplied by."""
    entries: torch.Tensor
    """[T, 5] int32: d, i, j, k of each term and its number, in the order of the weights."""
    entry_ends: torch.Tensor
    """[P] int32: the cumulative ends of the weights' terms in ``entries``."""
    places: torch.Tensor
    """[D + O, 2] int64: component i of channel c is column places[i, 0] + c * places[i, 1] of x; then y's."""
    fingerprint: int
    """Of heads to entry_ends: a backend has kernels for the tables that it knows by this number. 0: none."""
    implementation: str
    """As for ``grouped_mm``: "native", "simt", "reference" or ""."""


TABLES = len(Polynomial._fields)
"""How many arguments of an operator are its tables, the last ones."""


def check(x: torch.Tensor, w: torch.Tensor, p: Polynomial) -> None:
    op = "indexed_polynomial"
    if x.dim() != 2 or w.dim() != 3 or w.shape[1] != p.entry_ends.shape[0]:
        raise ShapeError(
            f"{op}: x must have shape [N, D C] and w [G, {p.entry_ends.shape[0]}, C], "
            f"got {list(x.shape)} and {list(w.shape)}."
        )
    if x.dtype not in (torch.float64, torch.float32) or w.dtype != x.dtype:
        raise DTypeError(f"{op}: x and w must both be float64 or float32, got {x.dtype} and {w.dtype}.")
    if p.factors.dtype != x.dtype:
        raise DTypeError(f"{op}: the factors must be of the dtype of x, {x.dtype}, got {p.factors.dtype}.")
    for name, other in (("w", w), ("labels", p.labels), ("heads", p.heads)):
        if other.device != x.device:
            raise DeviceError(f"{op}: {name} must be on the device of x, {x.device}, got {other.device}.")
    if p.labels.shape != x.shape[:1] or p.labels.dtype != torch.int64:
        raise ShapeError(
            f"{op}: labels must be int64 [{x.shape[0]}], got {p.labels.dtype} {list(p.labels.shape)}."
        )


def batched(call: Callable[..., torch.Tensor], slots: int, weights: int | None, groups: int | None) -> Any:
    """The batching rule of an operator: V batches are V N rows, with labels of their own where each has
    weights of its own. ``weights`` and ``groups`` are the positions of w and of the number of groups."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        tables = len(arguments) - TABLES
        if size == 0:
            return _vmap._none(call, in_dims, arguments)
        if any(d is not None for d in in_dims[tables:]):
            return _vmap._slices(call, size, in_dims, arguments)
        given = list(arguments)
        labels = given[tables]
        own = groups is not None or (weights is not None and in_dims[weights] is not None)
        for i, (t, d) in enumerate(zip(arguments[:tables], in_dims, strict=False)):
            if not isinstance(t, torch.Tensor) or (i == weights and not own):
                continue
            t = t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
            given[i] = t.reshape(t.shape[0] * t.shape[1], *t.shape[2:])
        count = arguments[groups] if groups is not None else 0
        if own and weights is not None:
            count = given[weights].shape[0] // size
        first = torch.arange(size, device=labels.device).unsqueeze(1) * count
        known = (labels >= 0) & (labels < count) if own else torch.ones_like(labels, dtype=torch.bool)
        given[tables] = torch.where(known, labels + first, -1 if own else labels).reshape(-1)
        given[tables + 1] = given[tables + 2] = None
        if groups is not None:
            given[groups] = count * size
        out = call(*given)
        return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0

    return rule
