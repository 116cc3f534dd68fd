"""``grouped_mm``: rows times the matrix of their group.

    y[n] = x[n] @ w[g(n)] + bias[g(n)]        x [N,(B,)K], w [G,(B|1,)K,M] -> y [N,(B,)M]

The call is checked here and given to the operator ``multigemm::grouped_mm``; its derivatives are calls
of this operator and of ``grouped_mm_wgrad`` and walk the same route, at any order:

    dx = grouped_mm(gy, w^T)        dw = grouped_mm_wgrad(x, gy)        dbias = grouped_mm_wgrad(1, gy)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _checks, _choice, _groups
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
    "grouped_mm(Tensor x, Tensor w, Tensor groups, bool offsets, Tensor? bias, "
    "ScalarType? out_dtype, str precision, str implementation) -> Tensor"
)
LIB.define(
    "grouped_mm_out(Tensor x, Tensor w, Tensor groups, bool offsets, Tensor? bias, "
    "Tensor(a!) out, str precision, str implementation) -> ()"
)


def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor | Sequence[int] | None = None,
    *,
    offsets: torch.Tensor | Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Multiply each row block of ``x`` by its group's matrix: ``y[n] = x[n] @ w[g(n)] + bias[g(n)]``.

    Args:
        x: [N, K], or [N, B, K] with a batched feature dimension B; float64, float32, float16 or bfloat16.
            The rows of a group are adjacent, groups in order (see ``sort_by_group``). Any strides.
        w: [G, K, M] where x is [N, K]; [G, B, K, M], or [G, 1, K, M] to share one matrix over B, where
            x is [N, B, K]. Dtype and device of x. A transposed view serves as well as a copy.
        group_sizes: [G] int32 or int64, rows of each group, on the device of x (never read back by a
            native backend) or on the CPU, or a list of integers. Their sum R may be less than N.
        offsets: [G], the cumulative ends of the groups, instead of ``group_sizes``.
        bias: [G, M], or [G, B, M] or [G, 1, M] where x is [N, B, K]; added before the one rounding.
        out_dtype: dtype of the result, that of x by default.
        out: tensor to write into, of the result's shape; not with operands that require gradients.
        precision: how float32 is multiplied: "ieee" or "tf32"; None follows torch's flags.
        implementation: "reference", "torch", "native", "blas", "simt" or a third party's name; None
            leaves it to ``use``, the environment, the accelerator and the default, in this order.

    Returns:
        y [N, M] or [N, B, M]. Rows R to N are zeros. Half precisions accumulate in float32, float32 in
        float32, float64 in float64. Differentiable to any order in x, w and bias.

    Raises:
        ShapeError, DTypeError, DeviceError, GroupSizesError, OptionError: a bad call (subclasses of
            ``ValueError`` or ``TypeError``), before anything is computed.
        BackendError: no usable backend (subclass of ``ImportError``).

    Sizes are data: negative ones count as zero and groups are cut off at N. With ``MULTIGEMM_CHECK=1``
    they are read and refused instead.
    """
    groups, is_offsets = _checks.groups_argument("grouped_mm", group_sizes, offsets)
    compiling = torch.compiler.is_compiling()
    if not compiling:  # a compiled call is checked by the fake kernel, with the same text
        _checks.grouped_mm(x, w, groups, is_offsets, bias, out_dtype, precision, implementation)
    name = _choice.pinned() if implementation is None else _choice.known(implementation, "grouped_mm")
    if out is None:
        if not compiling:
            return _direct.product(
                "grouped_mm", x, w, groups, is_offsets, bias, out_dtype, precision or "", name
            )
        result: torch.Tensor = torch.ops.multigemm.grouped_mm.default(
            x, w, groups, is_offsets, bias, out_dtype, precision or "", name
        )
        return result
    if out_dtype is not None and out.dtype != out_dtype:
        raise OptionError(
            f"grouped_mm: out has dtype {out.dtype} but out_dtype is {out_dtype}; give one of them."
        )
    if grad_needed(x, w, bias) or has_tangent(x, w, bias):
        raise OptionError(
            "grouped_mm: out= is not differentiable; leave it out or call under torch.no_grad()."
        )
    _checks.output("grouped_mm", out, (*x.shape[:-1], w.shape[-1]), x, x, w, bias, groups)
    torch.ops.multigemm.grouped_mm_out(x, w, groups, is_offsets, bias, out, precision or "", name)
    return out


def _empty(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[-1]), dtype=out_dtype or x.dtype)


def _function(
    x: torch.Tensor, groups: torch.Tensor, offsets: bool, implementation: str
) -> Callable[..., None]:
    """The function that computes the product into ``out``; the sizes are checked where that is asked for."""
    if _groups.check_enabled():
        _groups.check_values("grouped_mm", groups, offsets, x.shape[0])
    leaf = torch.ops.multigemm.native_grouped_mm.default
    return _route.implementation("grouped_mm", leaf, x.device, implementation)


def _out_kernel(
    x: torch.Tensor,
    w: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    precision: str,
    implementation: str,
) -> None:
    """The kernel of every device: writes all of ``out``."""
    _function(x, groups, offsets, implementation)(x, w, groups, offsets, bias, out, precision)


def _kernel(
    x: torch.Tensor,
    w: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str,
    implementation: str,
) -> torch.Tensor:
    run = _function(x, groups, offsets, implementation)  # before memory is taken: it may refuse the call
    out = _empty(x, w, out_dtype)
    run(x, w, groups, offsets, bias, out, precision)
    return out


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str,
    implementation: str,
) -> torch.Tensor:
    _checks.grouped_mm(x, w, groups, offsets, bias, out_dtype, precision or None, implementation)
    return _empty(x, w, out_dtype)


def _fake_out(
    x: torch.Tensor,
    w: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    precision: str,
    implementation: str,
) -> None:
    _checks.grouped_mm(x, w, groups, offsets, bias, out.dtype, precision or None, implementation)


class _GroupedMM(Function):
    operator = torch.ops.multigemm.grouped_mm.default

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _GroupedMM.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, w, groups, offsets, bias, _, precision, implementation = inputs
        x_needed, w_needed = ctx.needs_input_grad[:2]
        # What no gradient asks for is not kept alive: frozen weights cost no memory and no product.
        ctx.save_for_backward(x if w_needed else None, w if x_needed else None, groups)
        ctx.dtype = x.dtype
        ctx.shared_w = x.dim() == 3 and w.shape[1] == 1 and x.shape[1] != 1
        ctx.shared_bias = bias is not None and x.dim() == 3 and bias.shape[1] == 1 and x.shape[1] != 1
        ctx.options = (offsets, precision, implementation)
        if forward_mode():
            ctx.save_for_forward(x, w, groups)
        ctx.out_dtype = output.dtype

    @staticmethod
    def jvp(
        ctx: Any, x_tangent: torch.Tensor | None, w_tangent: torch.Tensor | None, *others: Any
    ) -> torch.Tensor | None:
        """dy = dx w + x dw + dbias, in the dtype of y."""
        offsets, precision, implementation = ctx.options
        bias_tangent = others[2]

        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            result: torch.Tensor = torch.ops.multigemm.grouped_mm.default(
                a, b, groups, offsets, bias, ctx.out_dtype, precision, implementation
            )
            return result

        with outer_tangents():
            x, w, groups = saved_for_tangents(ctx)
            terms = [product(x_tangent, w)] if x_tangent is not None else []
            if w_tangent is not None:
                terms.append(product(x, w_tangent))
            if bias_tangent is not None:
                terms.append(product(torch.zeros_like(x), torch.zeros_like(w), bias_tangent))
            return sum_of(terms)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, groups = ctx.saved_tensors
        product = functools.partial(_direct.product, "grouped_mm")
        wgrad = functools.partial(_direct.product, "grouped_mm_wgrad")
        offsets, precision, implementation = ctx.options
        gy = gy.to(ctx.dtype)
        gx = gw = gbias = None
        if ctx.needs_input_grad[0]:
            gx = product(gy, w.mT, groups, offsets, None, None, precision, implementation)
        if ctx.needs_input_grad[1]:
            gw = wgrad(x, gy, groups, offsets, ctx.shared_w, None, precision, implementation)
        if ctx.needs_input_grad[4]:
            ones = gy.new_ones(()).expand(*gy.shape[:-1], 1)
            row = wgrad(ones, gy, groups, offsets, ctx.shared_bias, None, precision, implementation)
            gbias = row.squeeze(-2)
        return gx, gw, None, None, gbias, None, None, None


class _DirectGroupedMM(_GroupedMM):
    """The same where nothing but autograd stands between a call and its kernel."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _kernel(*arguments)


_direct.WAYS["grouped_mm"] = _direct.Ways(_GroupedMM.operator, _kernel, _DirectGroupedMM)

LIB.impl("grouped_mm", _kernel, "CompositeExplicitAutograd")
LIB.impl("grouped_mm_out", _out_kernel, "CompositeExplicitAutograd")
LIB.impl("grouped_mm", _GroupedMM.run, "Autograd")
register_fake("grouped_mm", _fake)
torch.library.register_vmap("multigemm::grouped_mm", _vmap.grouped_mm, lib=LIB)
LIB.impl("grouped_mm_out", _fake_out, "Meta")  # no result: no device to tell
for _device_type, _key in AUTOCAST_KEYS.items():
    LIB.impl("grouped_mm", _autocast.rule(torch.ops.multigemm.grouped_mm.default, _device_type, _key), _key)
