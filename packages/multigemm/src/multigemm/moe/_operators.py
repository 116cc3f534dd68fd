"""The operators around the products of the layer: router, order, gather, activation, combine.

Each has native kernels on a device that a backend serves, and elsewhere what ``_composed`` says. First
derivatives are kernels too; one that is itself to be differentiated is composed of differentiable operators.
As in ``_composed``, P = T k places in expert order, and permutation, inverse, ends, k those of ``Places``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _dispatch
from ..ops._library import LIB, Function, register_fake
from . import _composed
from ._composed import Activation, Places, Scores, wide

PLACES = "Tensor permutation, Tensor inverse, Tensor ends, int k"
_ACTIVATION = "int kind, bool gated, bool interleaved, float alpha, float limit"
_SCORES = "bool sigmoid, bool renormalize, float scale"

LIB.define(
    f"moe_route(Tensor logits, Tensor? correction, int k, {_SCORES}, int groups, int top_groups, bool best) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIB.define(f"moe_route_backward(Tensor grad, Tensor logits, Tensor experts, {_SCORES}) -> Tensor")
LIB.define("moe_order(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)")
LIB.define(f"moe_spread(Tensor x, {PLACES}) -> Tensor")
LIB.define(f"moe_collect(Tensor rows, Tensor? weights, Tensor? other, {PLACES}, ScalarType dtype) -> Tensor")
LIB.define(f"moe_collect_backward(Tensor gy, Tensor rows, Tensor weights, {PLACES}) -> (Tensor, Tensor)")
LIB.define(f"moe_activate(Tensor h, Tensor? weights, {PLACES}, {_ACTIVATION}) -> Tensor")
LIB.define(
    f"moe_activate_backward(Tensor grad, Tensor h, Tensor? weights, {PLACES}, {_ACTIVATION}) "
    "-> (Tensor, Tensor)"
)
_ops = torch.ops.multigemm


def _native(x: torch.Tensor) -> bool:
    """Whether a backend serves the device. Raises ``BackendError`` where one should and none does."""
    return _dispatch.backend_for(x.device.type) is not None


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [N, H] with unit stride along H, for the kernels."""
    return x if x.stride(1) == 1 else x.contiguous()


def _int32(like: torch.Tensor, count: Any) -> torch.Tensor:
    return like.new_empty(count, dtype=torch.int32)


# --- the router -----------------------------------------------------------------------------------


def _route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    best: bool,
) -> tuple[torch.Tensor, ...]:
    experts, weights, permutation, inverse, ends = _route_fake(logits, correction, k)
    _ops.native_moe_route(
        logits, correction, experts, weights, permutation, inverse, ends, None, None,
        int(sigmoid), renormalize, groups, top_groups, int(best), scale,
    )  # fmt: skip
    return experts, weights, permutation, inverse, ends


def _route_fake(
    logits: torch.Tensor, correction: torch.Tensor | None, k: int, *options: Any
) -> tuple[torch.Tensor, ...]:
    tokens, experts = logits.shape
    return (
        logits.new_empty((tokens, k), dtype=torch.int64),
        logits.new_empty((tokens, k), dtype=wide(logits.dtype)),
        _int32(logits, tokens * k),
        _int32(logits, tokens * k),
        _int32(logits, experts),
    )


def _route_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    experts: torch.Tensor,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> torch.Tensor:
    if not _native(logits):
        return _composed.route_backward(grad, logits, experts, Scores(sigmoid, renormalize, scale))
    out = _route_backward_fake(grad, logits)
    _ops.native_moe_route_backward(
        grad.contiguous(), logits, experts.contiguous(), out, int(sigmoid), renormalize, scale
    )
    return out


def _route_backward_fake(grad: torch.Tensor, logits: torch.Tensor, *options: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


class _Route(Function):
    operator = _ops.moe_route.default

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _Route.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[0])
        ctx.options = inputs[3:6]
        ctx.mark_non_differentiable(output[0], *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _composed.route_backward(grads[1], logits, experts, Scores(*ctx.options))
        else:
            found = _ops.moe_route_backward(grads[1], logits, experts, *ctx.options)
        return found, *(None,) * 8


def _order(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    if not _native(experts):
        return _composed.order(experts, num_experts)[:3]
    permutation, inverse, ends = _order_fake(experts, num_experts)
    experts = experts.to(torch.int64).contiguous()
    _ops.native_moe_route(
        None, None, experts, None, permutation, inverse, ends, None, None, 0, False, 1, 1, 0, 1.0
    )
    return permutation, inverse, ends


def _order_fake(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    slots = experts.numel()
    return _int32(experts, slots), _int32(experts, slots), _int32(experts, num_experts)


# --- gather and combine ---------------------------------------------------------------------------


def _spread(
    x: torch.Tensor, permutation: torch.Tensor, inverse: torch.Tensor, ends: torch.Tensor, k: int
) -> torch.Tensor:
    if not _native(x):
        return _composed.spread(x, Places(permutation, inverse, ends, k))
    out = _spread_fake(x, permutation)
    _ops.native_moe_spread(rows_of(x), inverse, ends, None, None, out, None, k)
    return out


def _spread_fake(x: torch.Tensor, permutation: torch.Tensor, *options: Any) -> torch.Tensor:
    return x.new_empty((permutation.shape[0], x.shape[1]))


class _Spread(Function):
    """The transpose of the unweighted ``moe_collect``."""

    operator = _ops.moe_spread.default

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _Spread.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *places, ctx.k = inputs
        ctx.save_for_backward(*places)
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gx = _ops.moe_collect(grad, None, None, *ctx.saved_tensors, ctx.k, ctx.dtype)
        return gx, None, None, None, None


def _collect(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    other: torch.Tensor | None,
    permutation: torch.Tensor,
    inverse: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if not _native(rows):
        return _composed.collect(rows, weights, other, Places(permutation, inverse, ends, k), dtype)
    out = _collect_fake(rows, weights, other, permutation, inverse, ends, k, dtype)
    _ops.native_moe_collect(
        rows_of(rows),
        inverse,
        ends,
        None if weights is None else weights.contiguous(),
        None if other is None else rows_of(other),
        out,
        k,
    )
    return out


def _collect_fake(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    other: torch.Tensor | None,
    permutation: torch.Tensor,
    inverse: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return rows.new_empty((rows.shape[0] // k, rows.shape[1]), dtype=dtype)


def _collect_backward(
    gy: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    permutation: torch.Tensor,
    inverse: torch.Tensor,
    ends: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _native(rows) or wide(gy.dtype) != wide(rows.dtype):
        return _composed.collect_backward(gy, rows, weights, Places(permutation, inverse, ends, k))
    grad_rows, dots = _collect_backward_fake(gy, rows, weights)
    _ops.native_moe_spread(
        rows_of(gy), inverse, ends, weights.contiguous(), rows_of(rows), grad_rows, dots, k
    )
    return grad_rows, dots


def _collect_backward_fake(
    gy: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


class _Collect(Function):
    operator = _ops.moe_collect.default

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _Collect.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rows, weights, other, *places, ctx.k, _ = inputs
        ctx.save_for_backward(None if weights is None else rows, weights, *places)
        ctx.dtype, ctx.other = rows.dtype, None if other is None else other.dtype

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, permutation, inverse, ends = ctx.saved_tensors
        places = Places(permutation, inverse, ends, ctx.k)
        grad_weights = None
        if weights is None:
            grad_rows = _ops.moe_spread(gy.to(ctx.dtype), *places)
        elif torch.is_grad_enabled():
            grad_rows, grad_weights = _composed.collect_backward(gy, rows, weights, places)
        else:
            grad_rows, grad_weights = _ops.moe_collect_backward(gy, rows, weights, *places)
        return grad_rows, grad_weights, None if ctx.other is None else gy.to(ctx.other), *(None,) * 5


# --- the activation -------------------------------------------------------------------------------


def _activate(
    h: torch.Tensor,
    weights: torch.Tensor | None,
    permutation: torch.Tensor,
    inverse: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    *how: Any,
) -> torch.Tensor:
    if not _native(h):
        return _composed.activate(h, weights, Places(permutation, inverse, ends, k), Activation(*how))
    out = _activate_fake(h, weights, permutation, inverse, ends, k, *how)
    slots = None if weights is None else weights.contiguous()
    _ops.native_moe_activate(h.contiguous(), permutation, ends, slots, out, k, *how)
    return out


def _activate_fake(h: torch.Tensor, *options: Any) -> torch.Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // (2 if options[6] else 1)))


def _activate_backward(
    grad: torch.Tensor,
    h: torch.Tensor,
    weights: torch.Tensor | None,
    permutation: torch.Tensor,
    inverse: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _native(h):
        places = Places(permutation, inverse, ends, k)
        grad_h, grad_weights = _composed.activate_backward(grad, h, weights, places, Activation(*how))
        return grad_h, h.new_empty(0) if grad_weights is None else grad_weights
    grad_h, grad_weights = _activate_backward_fake(grad, h, weights)
    slots = None if weights is None else weights.contiguous()
    _ops.native_moe_activate_backward(
        grad.contiguous(), h.contiguous(), permutation, ends, slots, grad_h,
        None if weights is None else grad_weights, None, k, *how,
    )  # fmt: skip
    return grad_h, grad_weights


def _activate_backward_fake(
    grad: torch.Tensor, h: torch.Tensor, weights: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without weights, the second result has no elements."""
    return h.new_empty(h.shape), h.new_empty(0) if weights is None else weights.new_empty(weights.shape)


class _Activate(Function):
    operator = _ops.moe_activate.default

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _Activate.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        h, weights, *places, ctx.k = inputs[:6]
        ctx.save_for_backward(h, weights, *places)
        ctx.how = inputs[6:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weights, permutation, inverse, ends = ctx.saved_tensors
        places = Places(permutation, inverse, ends, ctx.k)
        grad_weights: torch.Tensor | None
        if torch.is_grad_enabled():
            grad_h, grad_weights = _composed.activate_backward(grad, h, weights, places, Activation(*ctx.how))
        else:
            grad_h, grad_weights = _ops.moe_activate_backward(grad, h, weights, *places, *ctx.how)
        return grad_h, None if weights is None else grad_weights, *(None,) * 9


# --- registration ---------------------------------------------------------------------------------


def slices(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The batching rule of all of these: slice by slice, as each slice has an order of its own."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        results = [
            operator(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


for _name, _kernel, _fake, _function in (
    ("moe_route", _route, _route_fake, _Route),
    ("moe_route_backward", _route_backward, _route_backward_fake, None),
    ("moe_order", _order, _order_fake, None),
    ("moe_spread", _spread, _spread_fake, _Spread),
    ("moe_collect", _collect, _collect_fake, _Collect),
    ("moe_collect_backward", _collect_backward, _collect_backward_fake, None),
    ("moe_activate", _activate, _activate_fake, _Activate),
    ("moe_activate_backward", _activate_backward, _activate_backward_fake, None),
):
    LIB.impl(_name, _kernel, "CompositeExplicitAutograd")
    register_fake(_name, _fake)
    if _function is not None:
        LIB.impl(_name, _function.run, "Autograd")
    torch.library.register_vmap(f"multigemm::{_name}", slices(getattr(_ops, _name).default), lib=LIB)
