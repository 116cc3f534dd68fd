"""``grouped_mm_wgrad``: the product over the rows of each group.

    dw[g] = sum over n in g of x[n]^T gy[n]   x [N,(B,)K], gy [N,(B,)M] -> dw [G,(B|1,)K,M]

It is the gradient of ``grouped_mm`` in the weights, and closes the pair under differentiation:

    dx = grouped_mm(gy, gdw^T)        dgy = grouped_mm(x, gdw)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _checks, _choice, _groups, _rules
from .._errors import OptionError
from . import _autocast, _direct, _route, _vmap
from ._library import (
    AUTOCAST_KEYS,
    LIB,
    Function,
    forward_mode,
    grad_needed,
    has_tangent,
    outer_tangents,
    register_fake,
    saved_for_tangents,
    sum_of,
)

LIB.define(
    "grouped_mm_wgrad(Tensor x, Tensor gy, Tensor groups, bool offsets, bool sum_batch, "
    "ScalarType? out_dtype, str precision, str implementation) -> Tensor"
)
LIB.define(
    "grouped_mm_wgrad_out(Tensor x, Tensor gy, Tensor groups, bool offsets, bool sum_batch, "
    "Tensor(a!) out, str precision, str implementation) -> ()"
)


def grouped_mm_wgrad(
    x: torch.Tensor,
    gy: torch.Tensor,
    group_sizes: torch.Tensor | Sequence[int] | None = None,
    *,
    offsets: torch.Tensor | Sequence[int] | None = None,
    sum_batch: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Sum the outer products of each group's rows: ``dw[g] = sum over n in g of x[n]^T gy[n]``.

    Args:
        x: [N, K] or [N, B, K]; float64, float32, float16 or bfloat16; any strides.
        gy: [N, M], or [N, B, M] where x is [N, B, K]; dtype and device of x.
        group_sizes: [G] int32 or int64 on the device of x or on the CPU, or a list of integers.
        offsets: [G], the cumulative ends of the groups, instead of ``group_sizes``.
        sum_batch: sum over B too, which gives [G, 1, K, M], the gradient of a matrix shared over B.
        out_dtype, out, precision, implementation: as in ``grouped_mm``.

    Returns:
        dw [G, K, M], or [G, B, K, M] ([G, 1, K, M] where ``sum_batch``). The matrix of an empty group is
        zero, and rows past the last group add nothing. Differentiable to any order in x and gy.

    Raises:
        As ``grouped_mm``.
    """
    groups, is_offsets = _checks.groups_argument("grouped_mm_wgrad", group_sizes, offsets)
    compiling = torch.compiler.is_compiling()
    if not compiling:  # a compiled call is checked by the fake kernel, with the same text
        _check(x, gy, groups, is_offsets, sum_batch, out_dtype, precision, implementation)
    name = _choice.pinned() if implementation is None else _choice.known(implementation, "grouped_mm_wgrad")
    if out is None:
        if not compiling:
            return _direct.product(
                "grouped_mm_wgrad", x, gy, groups, is_offsets, sum_batch, out_dtype, precision or "", name
            )
        result: torch.Tensor = torch.ops.multigemm.grouped_mm_wgrad.default(
            x, gy, groups, is_offsets, sum_batch, out_dtype, precision or "", name
        )
        return result
    if out_dtype is not None and out.dtype != out_dtype:
        raise OptionError(
            f"grouped_mm_wgrad: out has dtype {out.dtype} but out_dtype is {out_dtype}; give one of them."
        )
    if grad_needed(x, gy) or has_tangent(x, gy):
        raise OptionError(
            "grouped_mm_wgrad: out= is not differentiable; leave it out or call under torch.no_grad()."
        )
    _checks.output("grouped_mm_wgrad", out, _shape(x, gy, groups, sum_batch), x, x, gy, groups)
    torch.ops.multigemm.grouped_mm_wgrad_out(x, gy, groups, is_offsets, sum_batch, out, precision or "", name)
    return out


def _check(
    x: torch.Tensor,
    gy: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    sum_batch: bool,
    out_dtype: torch.dtype | None,
    precision: str | None,
    implementation: str | None,
) -> None:
    _checks.grouped_mm_wgrad(x, gy, groups, offsets, out_dtype, precision, implementation)
    if sum_batch:
        _rules.sum_batch("grouped_mm_wgrad", x.shape)


def _shape(x: torch.Tensor, gy: torch.Tensor, groups: torch.Tensor, sum_batch: bool) -> tuple[int, ...]:
    batch = (1,) if sum_batch else x.shape[1:-1]
    return (groups.shape[0], *batch, x.shape[-1], gy.shape[-1])


def _function(
    x: torch.Tensor, groups: torch.Tensor, offsets: bool, implementation: str
) -> Callable[..., None]:
    """The function that computes the product into ``out``; the sizes are checked where that is asked for."""
    if _groups.check_enabled():
        _groups.check_values("grouped_mm_wgrad", groups, offsets, x.shape[0])
    leaf = torch.ops.multigemm.native_grouped_mm_wgrad.default
    return _route.implementation("grouped_mm_wgrad", leaf, x.device, implementation)


def _out_kernel(
    x: torch.Tensor,
    gy: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    sum_batch: bool,
    out: torch.Tensor,
    precision: str,
    implementation: str,
) -> None:
    """The kernel of every device: writes all of ``out``."""
    _function(x, groups, offsets, implementation)(x, gy, groups, offsets, sum_batch, out, precision)


def _kernel(
    x: torch.Tensor,
    gy: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    sum_batch: bool,
    out_dtype: torch.dtype | None,
    precision: str,
    implementation: str,
) -> torch.Tensor:
    run = _function(x, groups, offsets, implementation)  # before memory is taken: it may refuse the call
    out = x.new_empty(_shape(x, gy, groups, sum_batch), dtype=out_dtype or x.dtype)
    run(x, gy, groups, offsets, sum_batch, out, precision)
    return out


def _fake(
    x: torch.Tensor,
    gy: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    sum_batch: bool,
    out_dtype: torch.dtype | None,
    precision: str,
    implementation: str,
) -> torch.Tensor:
    _check(x, gy, groups, offsets, sum_batch, out_dtype, precision or None, implementation)
    return x.new_empty(_shape(x, gy, groups, sum_batch), dtype=out_dtype or x.dtype)


def _fake_out(
    x: torch.Tensor,
    gy: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    sum_batch: bool,
    out: torch.Tensor,
    precision: str,
    implementation: str,
) -> None:
    _check(x, gy, groups, offsets, sum_batch, out.dtype, precision or None, implementation)


class _GroupedMMWgrad(Function):
    operator = torch.ops.multigemm.grouped_mm_wgrad.default

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _GroupedMMWgrad.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, gy, groups, offsets, sum_batch, _, precision, implementation = inputs
        x_needed, gy_needed = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if gy_needed else None, gy if x_needed else None, groups)
        ctx.dtype = x.dtype
        ctx.options = (offsets, None, None, precision, implementation)
        if forward_mode():
            ctx.save_for_forward(x, gy, groups)
        ctx.forward_options = (offsets, sum_batch, output.dtype, precision, implementation)

    @staticmethod
    def jvp(
        ctx: Any, x_tangent: torch.Tensor | None, gy_tangent: torch.Tensor | None, *others: Any
    ) -> torch.Tensor | None:
        """d(dw) = dx^T gy + x^T dgy, in the dtype of dw."""
        wgrad = torch.ops.multigemm.grouped_mm_wgrad.default
        with outer_tangents():
            x, gy, groups = saved_for_tangents(ctx)
            terms = [wgrad(x_tangent, gy, groups, *ctx.forward_options)] if x_tangent is not None else []
            if gy_tangent is not None:
                terms.append(wgrad(x, gy_tangent, groups, *ctx.forward_options))
            return sum_of(terms)

    @staticmethod
    def backward(ctx: Any, gdw: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gy, groups = ctx.saved_tensors
        product = functools.partial(_direct.product, "grouped_mm")
        gdw = gdw.to(ctx.dtype)
        gx = ggy = None
        if ctx.needs_input_grad[0]:
            gx = product(gy, gdw.mT, groups, *ctx.options)
        if ctx.needs_input_grad[1]:
            ggy = product(x, gdw, groups, *ctx.options)
        return gx, ggy, None, None, None, None, None, None


class _DirectGroupedMMWgrad(_GroupedMMWgrad):
    """The same where nothing but autograd stands between a call and its kernel."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _kernel(*arguments)


_direct.WAYS["grouped_mm_wgrad"] = _direct.Ways(_GroupedMMWgrad.operator, _kernel, _DirectGroupedMMWgrad)

LIB.impl("grouped_mm_wgrad", _kernel, "CompositeExplicitAutograd")
LIB.impl("grouped_mm_wgrad_out", _out_kernel, "CompositeExplicitAutograd")
LIB.impl("grouped_mm_wgrad", _GroupedMMWgrad.run, "Autograd")
register_fake("grouped_mm_wgrad", _fake)
torch.library.register_vmap("multigemm::grouped_mm_wgrad", _vmap.grouped_mm_wgrad, lib=LIB)
LIB.impl("grouped_mm_wgrad_out", _fake_out, "Meta")  # no result: no device to tell
for _device_type, _key in AUTOCAST_KEYS.items():
    LIB.impl(
        "grouped_mm_wgrad",
        _autocast.rule(torch.ops.multigemm.grouped_mm_wgrad.default, _device_type, _key),
        _key,
    )
