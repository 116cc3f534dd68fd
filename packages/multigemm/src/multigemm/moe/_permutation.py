"""Tokens to their slots in expert order, and back, with sums in a fixed order.

A token has k slots. ``order`` is the ``GroupOrder`` of all T k slots: slot s goes to place
``order.inverse[s]``, and at place p stands slot ``order.permutation[p]``, of token ``permutation[p] // k``.

    spread   rows[p] = x[permutation[p] // k]                                x [T, H] -> rows [T k, H]
    collect  x[t]    = sum over j of rows[inverse[t k + j]]                  its transpose
    combine  y[t]    = sum over j of weights[t, j] * rows[inverse[t k + j]]

Each is the others' derivative, so there are derivatives of any order; torch's own gradient of a gather adds
rows by atomics on a GPU, in an order that changes from call to call. Sums go over j in order, in float32 or
float64, and are rounded once. Nothing reads a value back from the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops import GroupOrder
from ..ops._library import grad_needed, signed


def spread(x: torch.Tensor, order: GroupOrder, k: int) -> torch.Tensor:
    """x [T, H] -> [T k, H], in expert order."""
    if not grad_needed(x):  # what autograd brings takes longer than the gather of a few tokens
        return _Spread.forward(x, order.permutation, order.inverse, k)
    result: torch.Tensor = _Spread.apply(x, order.permutation, order.inverse, k)  # type: ignore[no-untyped-call]
    return result


def combine(rows: torch.Tensor, weights: torch.Tensor, order: GroupOrder, dtype: torch.dtype) -> torch.Tensor:
    """rows [T k, H] in expert order, weights [T, k] -> [T, H] of ``dtype``."""
    if not grad_needed(rows, weights):
        return _Combine.forward(rows, weights, order.permutation, order.inverse, dtype)
    result: torch.Tensor = _Combine.apply(rows, weights, order.permutation, order.inverse, dtype)  # type: ignore[no-untyped-call]
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a forward returns must not be what ``Tensor.to`` hands through: compiled by PyTorch 2.11, the
    gradient would go to the intermediate of the same name, and be lost."""
    return total if total.dtype == dtype else total.to(dtype)


class _Rearrangement(torch.autograd.Function):
    """Of (tensor, permutation, inverse, k): only the places are kept, since the map is linear."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, permutation, inverse, ctx.k = inputs
        ctx.save_for_backward(permutation, inverse)


@signed
class _Spread(_Rearrangement):
    @staticmethod
    def forward(x: torch.Tensor, permutation: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        return x.index_select(0, permutation // k)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Collect.apply(grads[0], *ctx.saved_tensors, ctx.k), None, None, None  # type: ignore[no-untyped-call]


@signed
class _Collect(_Rearrangement):
    @staticmethod
    def forward(rows: torch.Tensor, permutation: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        places = inverse.view(-1, k)
        total = rows.index_select(0, places[:, 0]).to(_wide(rows.dtype))
        for j in range(1, k):
            total = total + rows.index_select(0, places[:, j])
        return _rounded(total, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Spread.apply(grads[0], *ctx.saved_tensors, ctx.k), None, None, None  # type: ignore[no-untyped-call]


@signed
class _Combine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: torch.Tensor,
        weights: torch.Tensor,
        permutation: torch.Tensor,
        inverse: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        k, wide = weights.shape[1], _wide(rows.dtype)
        places, factors = inverse.view(-1, k), weights.to(wide)
        total = rows.index_select(0, places[:, 0]) * factors[:, :1]
        for j in range(1, k):
            total = torch.addcmul(total, rows.index_select(0, places[:, j]).to(wide), factors[:, j : j + 1])
        return _rounded(total, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, permutation, inverse = ctx.saved_tensors
        k = weights.shape[1]
        g: torch.Tensor = _Spread.apply(grads[0], permutation, inverse, k)  # type: ignore[no-untyped-call]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            factors = weights.reshape(-1).index_select(0, permutation).unsqueeze(1)
            grad_rows = (g * factors).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            wide = _wide(rows.dtype)
            dots = (g.to(wide) * rows).sum(-1)
            grad_weights = dots.index_select(0, inverse).view(-1, k).to(weights.dtype)
        return grad_rows, grad_weights, None, None, None
