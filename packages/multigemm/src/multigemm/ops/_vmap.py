"""Batching rules: one call of the operator, the mapped dimension V folded into B or into the rows.

Only mapped group sizes, which give every slice another structure, are computed slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[..., torch.Tensor]


def _front(t: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """The mapped dimension second: [N, ...] or a batch of it -> [N, V, ...]; a view."""
    if dim is None:
        return t.unsqueeze(1).expand(t.shape[0], size, *t.shape[1:])
    return t.movedim(dim, 1)


def _merge(t: torch.Tensor) -> torch.Tensor:
    """[n, V, B, ...] -> [n, V B, ...]."""
    return t.reshape(t.shape[0], t.shape[1] * t.shape[2], *t.shape[3:])


def _rows(t: torch.Tensor) -> torch.Tensor:
    """[N, V, ...] -> [N V, ...]: the mapped dimension becomes rows, next to each other in their group."""
    return t.reshape(t.shape[0] * t.shape[1], *t.shape[2:])


def _slices(
    call: Call, size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[torch.Tensor, int]:
    results = []
    for i in range(size):
        results.append(
            call(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
        )
    return torch.stack(results), 0


def grouped_mm(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    call, size = torch.ops.multigemm.grouped_mm.default, info.batch_size
    x, w, groups, offsets, bias, *options = arguments
    x_dim, w_dim, groups_dim, _, bias_dim = in_dims[:5]
    if size == 0:
        return _none(call, in_dims, arguments)
    if groups_dim is not None:
        return _slices(call, size, in_dims, arguments)
    batched = x.dim() - (x_dim is not None) == 3
    x = _front(x, x_dim, size)
    if w_dim is None and bias_dim is None:
        if not batched:  # V takes the place of B and shares the weights: nothing is copied
            bias = None if bias is None else bias.unsqueeze(1)
            return call(x, w.unsqueeze(1), groups, offsets, bias, *options), 1
        y = call(_rows(x), w, groups * size, offsets, bias, *options)
        return y.reshape(x.shape[0], size, *y.shape[1:]), 1
    w = _front(w, w_dim, size) if w_dim is not None or batched else w.unsqueeze(1)
    if bias is not None:
        bias = _front(bias, bias_dim, size) if bias_dim is not None or batched else bias.unsqueeze(1)
    if not batched:
        return call(x, w, groups, offsets, bias, *options), 1
    width = x.shape[2]
    w = _merge(w.expand(-1, -1, width, -1, -1))
    if bias is not None:
        bias = _merge(bias.expand(-1, -1, width, -1))
    y = call(_merge(x), w, groups, offsets, bias, *options)
    return y.reshape(x.shape[0], size, width, y.shape[-1]), 1


def grouped_mm_wgrad(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    call, size = torch.ops.multigemm.grouped_mm_wgrad.default, info.batch_size
    x, gy, groups, offsets, sum_batch, *options = arguments
    x_dim, gy_dim, groups_dim = in_dims[:3]
    if size == 0:
        return _none(call, in_dims, arguments)
    if groups_dim is not None:
        return _slices(call, size, in_dims, arguments)
    batched = x.dim() - (x_dim is not None) == 3
    x, gy = _front(x, x_dim, size), _front(gy, gy_dim, size)
    if not batched:
        return call(x, gy, groups, offsets, False, *options), 1
    width = x.shape[2]
    if sum_batch:  # B is summed as rows are, V is kept apart as B is
        x, gy = _rows(x.transpose(1, 2)), _rows(gy.transpose(1, 2))
        return call(x, gy, groups * width, offsets, False, *options).unsqueeze(2), 1
    dw = call(_merge(x), _merge(gy), groups, offsets, False, *options)
    return dw.reshape(dw.shape[0], size, width, *dw.shape[2:]), 1


def _none(
    call: Call, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[torch.Tensor, int]:
    """A mapped dimension of size zero: the shape of one slice, no slices."""
    one = call(
        *(
            a if d is None else a.new_zeros([n for i, n in enumerate(a.shape) if i != d % a.dim()])
            for a, d in zip(arguments, in_dims, strict=True)
        )
    )
    return one.new_empty((0, *one.shape)), 0
