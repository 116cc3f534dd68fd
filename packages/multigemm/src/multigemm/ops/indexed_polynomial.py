"""``indexed_polynomial``: a sparse polynomial of each row, with coefficients of the row's label.

    y[n, d, c] = sum over terms t = (d, i, j, k, p) of
                 f[t] * w[g(n), p, c] * X[n, i, c] * X[n, j, c] * X[n, k, c]

X has D components of x and, as number D, ones; f are numbers, so that terms can share a weight. With m
directions v_1 .. v_m the monomial is replaced by its m-th derivative along them. Three operators share the
work and are closed under differentiation, at any order:

    indexed_polynomial(x, v, w)             y, linear in w and in each direction
    indexed_polynomial_xgrad(x, v, w, gy)   the gradient of <gy, y> in one more direction
    indexed_polynomial_wgrad(x, v, gy)      the gradient of <gy, y> in w

since the derivative in x is one more direction, and the monomials are of degree 3. Symmetric contractions of
equivariant networks are such polynomials; ``multigemm.equivariant`` makes the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import _reference_polynomial, _route_polynomial
from . import _direct
from ._library import LIB, Function, forward_mode, outer_tangents, register_fake, saved_for_tangents, sum_of
from ._polynomial import TABLES, batched, check
from ._polynomial import Polynomial as Polynomial

_TABLES = "Tensor heads, Tensor pairs, Tensor last, Tensor factors, Tensor entries, Tensor entry_ends"
_ROWS = (
    f"Tensor labels, Tensor? permutation, Tensor? group_sizes, {_TABLES}, Tensor places, "
    "int fingerprint, str implementation"
)
LIB.define(f"indexed_polynomial(Tensor x, Tensor? v1, Tensor? v2, Tensor? v3, Tensor w, {_ROWS}) -> Tensor")
LIB.define(
    f"indexed_polynomial_xgrad(Tensor x, Tensor? v1, Tensor? v2, Tensor w, Tensor gy, {_ROWS}) -> Tensor"
)
LIB.define(
    "indexed_polynomial_wgrad(Tensor x, Tensor? v1, Tensor? v2, Tensor? v3, Tensor gy, SymInt groups, "
    f"{_ROWS}) -> Tensor"
)
LIB.define(
    "native_weighted_polynomial(str kind, Tensor x, Tensor[] directions, Tensor? w, Tensor? gy, "
    f"Tensor labels, Tensor? permutation, Tensor? ends, {_TABLES}, Tensor places, int fingerprint, "
    "Tensor(a!) out, str implementation) -> ()"
)


def indexed_polynomial(x: torch.Tensor, w: torch.Tensor, polynomial: Polynomial) -> torch.Tensor:
    """x [N, D C], w [G, P, C] -> y [N, O C], float64 or float32. Differentiable to any order in x and w.

    Rows whose label is outside 0 .. G-1 give zeros. Nothing is read back from the device.
    """
    if not torch.compiler.is_compiling():
        check(x, w, polynomial)
    return evaluated(x, w, polynomial)


def evaluated(x: torch.Tensor, w: torch.Tensor, polynomial: Polynomial) -> torch.Tensor:
    """The same for operands that fit."""
    return _direct.call("indexed_polynomial", (x, w), (x, None, None, None, w, *polynomial))


def at_once(
    x: torch.Tensor,
    w: torch.Tensor,
    labels: torch.Tensor,
    tables: tuple[Any, ...],
    columns: int,
    name: str,
    kernel: str,
) -> torch.Tensor:
    """The same for an x that is ``_direct.plain``, constant w and tables of which none has to be looked at,
    where ``_route_polynomial.at_once`` named the kernel: y [N, columns]."""
    if x.requires_grad and torch.is_grad_enabled():
        record = _direct.WAYS["indexed_polynomial"].function.record
        return record(x, None, None, None, w, labels, None, None, *tables, name)
    out = x.new_empty((x.shape[0], columns))
    _route_polynomial.launch(
        kernel, x.device, "value", _lined(x), [], w, None, labels, None, None, *tables, out
    )
    return out


# --- kernels ----------------------------------------------------------------------------------------


def _run(
    kind: str,
    x: torch.Tensor,
    directions: list[torch.Tensor],
    w: torch.Tensor | None,
    gy: torch.Tensor | None,
    p: Polynomial,
    out: torch.Tensor,
) -> torch.Tensor:
    run = _route_polynomial.implementation(x.device, p.implementation)
    if run is None:
        _reference_polynomial.run(kind, x, directions, w, gy, p, out)
        return out
    ends = permutation = None
    if kind == "wgrad":
        permutation, sizes = p.permutation, p.group_sizes
        if permutation is None or sizes is None:
            permutation, ends = _sorted(p.labels, out.shape[0])
        else:
            ends = sizes.cumsum(0)
    rows = [_lined(t) for t in (x, *directions)]
    gy = None if gy is None else _lined(gy)
    w = None if w is None else _lined(w)
    run(kind, rows[0], rows[1:], w, gy, p.labels, permutation, ends, *p[3:-1], out)
    return out


def _sorted(labels: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows by label, and the ends [G] of the groups among them: ``sort_by_group`` with half its launches,
    as nothing is undone and rows without a group may lie past the last one in any order."""
    ordered, permutation = torch.where(labels < 0, groups, labels).sort(stable=True)
    numbers = torch.arange(1, groups + 1, device=labels.device)
    return permutation, torch.searchsorted(ordered, numbers)


def _lined(t: torch.Tensor) -> torch.Tensor:
    """With unit stride along the last dimension, which the kernels read by vectors: a copy where need be."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _directions(*vs: torch.Tensor | None) -> list[torch.Tensor]:
    return [v for v in vs if v is not None]


def _value(
    x: torch.Tensor,
    v1: torch.Tensor | None,
    v2: torch.Tensor | None,
    v3: torch.Tensor | None,
    w: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    p = Polynomial(*rest)
    return _run("value", x, _directions(v1, v2, v3), w, None, p, _like_y(x, w, p))


def _xgrad(
    x: torch.Tensor,
    v1: torch.Tensor | None,
    v2: torch.Tensor | None,
    w: torch.Tensor,
    gy: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    out = x.new_empty(x.shape)
    return _run("xgrad", x, _directions(v1, v2), w, gy, Polynomial(*rest), out)


def _wgrad(
    x: torch.Tensor,
    v1: torch.Tensor | None,
    v2: torch.Tensor | None,
    v3: torch.Tensor | None,
    gy: torch.Tensor,
    groups: int,
    *rest: Any,
) -> torch.Tensor:
    p = Polynomial(*rest)
    return _run("wgrad", x, _directions(v1, v2, v3), None, gy, p, _like_w(x, gy, groups, p))


def _like_y(x: torch.Tensor, w: torch.Tensor, p: Polynomial) -> torch.Tensor:
    return x.new_empty(x.shape[0], p.places.shape[0] * w.shape[2] - x.shape[1])


def _like_w(x: torch.Tensor, gy: torch.Tensor, groups: int, p: Polynomial) -> torch.Tensor:
    channels = (x.shape[1] + gy.shape[1]) // max(p.places.shape[0], 1)
    return x.new_empty(groups, p.entry_ends.shape[0], channels)


_VALUE = torch.ops.multigemm.indexed_polynomial.default
_XGRAD = torch.ops.multigemm.indexed_polynomial_xgrad.default
_WGRAD = torch.ops.multigemm.indexed_polynomial_wgrad.default


_NUMBERS = 2
"""Of the tables, the last ones that are no tensors."""


# --- derivatives ------------------------------------------------------------------------------------
# Of a scalar s = <gy, y(x; v, w)>, each in terms of the same three. None stands for zeros: a fourth
# derivative.

Vs = list[torch.Tensor]


def _y(x: torch.Tensor, vs: Vs, w: torch.Tensor, rest: Any) -> torch.Tensor | None:
    if len(vs) > 3:
        return None
    arguments = (x, *vs, *[None] * (3 - len(vs)), w, *rest)
    return _direct.call("indexed_polynomial", (x, w, *vs), arguments)


def _gx(x: torch.Tensor, vs: Vs, w: torch.Tensor, gy: torch.Tensor, rest: Any) -> torch.Tensor | None:
    if len(vs) > 2:
        return None
    arguments = (x, *vs, *[None] * (2 - len(vs)), w, gy, *rest)
    return _direct.call("indexed_polynomial_xgrad", (x, w, gy, *vs), arguments)


def _gw(x: torch.Tensor, vs: Vs, gy: torch.Tensor, groups: int, rest: Any) -> torch.Tensor | None:
    if len(vs) > 3:
        return None
    arguments = (x, *vs, *[None] * (3 - len(vs)), gy, groups, *rest)
    return _direct.call("indexed_polynomial_wgrad", (x, gy, *vs), arguments)


def _without(vs: Vs, i: int) -> Vs:
    return vs[:i] + vs[i + 1 :]


def _sum(terms: list[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    total = sum_of([t for t in terms if t is not None])
    return torch.zeros_like(like) if total is None else total


class _Derivatives(Function):
    """What the three have in common: how many directions there are, what is saved."""

    slots: ClassVar[int]
    """Places for directions."""

    @classmethod
    def save(cls, ctx: Any, inputs: tuple[Any, ...], others: tuple[Any, ...]) -> None:
        tables = inputs[-TABLES:]
        tensors = (*inputs[: 1 + cls.slots], *others, *tables[:-_NUMBERS])
        ctx.save_for_backward(*tensors)
        if forward_mode():
            ctx.save_for_forward(*tensors)
        ctx.named = tables[-_NUMBERS:]

    @classmethod
    def saved(cls, ctx: Any, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, Vs, list[torch.Tensor], Any]:
        """x, the directions, the other operands, and the tables."""
        x, *others = tensors
        first = _NUMBERS - TABLES
        rest = (*others[first:], *ctx.named)
        return x, _directions(*others[: cls.slots]), others[cls.slots : first], rest

    @classmethod
    def gradients(cls, ctx: Any, of_x: Callable[[], Any], of_v: Callable[[int], Any], vs: Vs) -> list[Any]:
        """For x and each slot of a direction, where they are asked for."""
        needed = ctx.needs_input_grad
        result = [of_x() if needed[0] else None]
        result += [of_v(i) if i < len(vs) and needed[1 + i] else None for i in range(cls.slots)]
        return result


class _Value(_Derivatives):
    operator = _VALUE
    slots = 3

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _Value.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _Value.save(ctx, inputs, (inputs[4],))

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[Any, ...]:
        x, vs, (w,), rest = _Value.saved(ctx, ctx.saved_tensors)
        found = _Value.gradients(
            ctx,
            lambda: _sum([_gx(x, vs, w, gy, rest)], x),
            lambda i: _gx(x, _without(vs, i), w, gy, rest),
            vs,
        )
        gw = _gw(x, vs, gy, w.shape[0], rest) if ctx.needs_input_grad[4] else None
        return (*found, gw, *[None] * TABLES)

    @staticmethod
    def jvp(ctx: Any, dx: Any, *tangents: Any) -> torch.Tensor:
        with outer_tangents():
            x, vs, (w,), rest = _Value.saved(ctx, saved_for_tangents(ctx))
            terms = [_y(x, [*vs, dx], w, rest)] if dx is not None else []
            terms += [
                _y(x, [*_without(vs, i), d], w, rest) for i, d in enumerate(tangents[:3]) if d is not None
            ]
            terms += [_y(x, vs, tangents[3], rest)] if tangents[3] is not None else []
            return _sum(terms, _like_y(x, w, Polynomial(*rest)))


class _XGrad(_Derivatives):
    operator = _XGRAD
    slots = 2

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _XGrad.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _XGrad.save(ctx, inputs, inputs[3:5])

    @staticmethod
    def backward(ctx: Any, u: torch.Tensor) -> tuple[Any, ...]:
        x, vs, (w, gy), rest = _XGrad.saved(ctx, ctx.saved_tensors)
        found = _XGrad.gradients(
            ctx,
            lambda: _sum([_gx(x, [*vs, u], w, gy, rest)], x),
            lambda i: _gx(x, [*_without(vs, i), u], w, gy, rest),
            vs,
        )
        gw = _gw(x, [*vs, u], gy, w.shape[0], rest) if ctx.needs_input_grad[3] else None
        ggy = _y(x, [*vs, u], w, rest) if ctx.needs_input_grad[4] else None
        return (*found, gw, ggy, *[None] * TABLES)

    @staticmethod
    def jvp(ctx: Any, dx: Any, *tangents: Any) -> torch.Tensor:
        with outer_tangents():
            x, vs, (w, gy), rest = _XGrad.saved(ctx, saved_for_tangents(ctx))
            terms = [_gx(x, [*vs, dx], w, gy, rest)] if dx is not None else []
            terms += [
                _gx(x, [*_without(vs, i), d], w, gy, rest)
                for i, d in enumerate(tangents[:2])
                if d is not None
            ]
            terms += [_gx(x, vs, tangents[2], gy, rest)] if tangents[2] is not None else []
            terms += [_gx(x, vs, w, tangents[3], rest)] if tangents[3] is not None else []
            return _sum(terms, x)


class _WGrad(_Derivatives):
    operator = _WGRAD
    slots = 3

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return _WGrad.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.groups = inputs[5]
        _WGrad.save(ctx, inputs, (inputs[4],))

    @staticmethod
    def backward(ctx: Any, u: torch.Tensor) -> tuple[Any, ...]:
        x, vs, (gy,), rest = _WGrad.saved(ctx, ctx.saved_tensors)
        found = _WGrad.gradients(
            ctx,
            lambda: _sum([_gx(x, vs, u, gy, rest)], x),
            lambda i: _gx(x, _without(vs, i), u, gy, rest),
            vs,
        )
        ggy = _y(x, vs, u, rest) if ctx.needs_input_grad[4] else None
        return (*found, ggy, None, *[None] * TABLES)

    @staticmethod
    def jvp(ctx: Any, dx: Any, *tangents: Any) -> torch.Tensor:
        with outer_tangents():
            x, vs, (gy,), rest = _WGrad.saved(ctx, saved_for_tangents(ctx))
            n = ctx.groups
            terms = [_gw(x, [*vs, dx], gy, n, rest)] if dx is not None else []
            terms += [
                _gw(x, [*_without(vs, i), d], gy, n, rest)
                for i, d in enumerate(tangents[:3])
                if d is not None
            ]
            terms += [_gw(x, vs, tangents[3], n, rest)] if tangents[3] is not None else []
            return _sum(terms, _like_w(x, gy, n, Polynomial(*rest)))


for _name, _class, _kernel, _position in (
    ("indexed_polynomial", _Value, _value, (4, None)),
    ("indexed_polynomial_xgrad", _XGrad, _xgrad, (3, None)),
    ("indexed_polynomial_wgrad", _WGrad, _wgrad, (None, 5)),
):
    _direct.WAYS[_name] = _direct.ways(_class, _kernel)
    LIB.impl(_name, _kernel, "CompositeExplicitAutograd")
    LIB.impl(_name, _class.run, "Autograd")
    torch.library.register_vmap(
        f"multigemm::{_name}", batched(_class.operator, _class.slots, *_position), lib=LIB
    )


def _fake_value(x: Any, v1: Any, v2: Any, v3: Any, w: Any, *rest: Any) -> torch.Tensor:
    p = Polynomial(*rest)
    check(x, w, p)
    return _like_y(x, w, p)


def _fake_wgrad(x: Any, v1: Any, v2: Any, v3: Any, gy: Any, groups: Any, *rest: Any) -> torch.Tensor:
    return _like_w(x, gy, groups, Polynomial(*rest))


register_fake("indexed_polynomial", _fake_value)
register_fake("indexed_polynomial_xgrad", lambda x, *rest: x.new_empty(x.shape))
register_fake("indexed_polynomial_wgrad", _fake_wgrad)
