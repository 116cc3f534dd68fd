"""The bilinear map of ``IndexedLinear`` and its derivatives, each as one call.

    y = map(x, w)        gx = map^T(gy, w)        gw = outer(x, gy)

are closed under differentiation: each one's gradients are the other two. Where nothing but autograd stands
between a call and its kernels (``ops/_direct.py``), a call is a gather of each block, which also brings its
columns into the order that the kernels read, a product for each path that reads W in place and writes where
it belongs, and a gather back into y; autograd records one node. Elsewhere it is composed of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _checks, _groups, _rules
from ..ops import _direct, _route, grouped_mm, grouped_mm_wgrad
from ..ops._library import Function, grad_needed
from ._rows import Places, gather


class Block(NamedTuple):
    """Columns ``start`` .. of x or y: ``mul`` copies of ``dim`` components."""

    start: int
    mul: int
    dim: int


class Step(NamedTuple):
    """A product between an input block and an output block, times the factor; its weights are columns
    ``start`` and the following."""

    block_in: int
    block_out: int
    start: int
    factor: float

    def source(self, transposed: bool) -> int:
        return self.block_out if transposed else self.block_in

    def target(self, transposed: bool) -> int:
        return self.block_in if transposed else self.block_out


Into = tuple[tuple[int, tuple[Step, ...]], ...]
"""The steps by the block that they are summed into, of those that have any."""


class Plan(NamedTuple):
    """What is multiplied with what. Nothing of a device is in here."""

    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    steps: tuple[Step, ...]
    components_last: bool
    """Whether columns of a block are [mul, 2l+1], the layout "mul_ir", instead of [2l+1, mul]."""
    common: float | None
    """The factor of every step, where they have the same."""
    into: tuple[Into, Into]
    """By output block, and, for the transposed map, by input block."""
    widths: tuple[int, int, int]
    """Columns of x, of y and of the weights."""


def plan(
    inputs: list[Block], outputs: list[Block], steps: list[Step], components_last: bool, weights: int
) -> Plan:
    steps = [s for s in steps if inputs[s.block_in].mul and outputs[s.block_out].mul]
    factors = {s.factor for s in steps}
    into: list[Into] = []
    for transposed in (False, True):
        by_target: dict[int, tuple[Step, ...]] = {}
        for s in steps:
            target = s.target(transposed)
            by_target[target] = (*by_target.get(target, ()), s)
        into.append(tuple(sorted(by_target.items())))
    return Plan(
        tuple(inputs),
        tuple(outputs),
        tuple(steps),
        components_last,
        factors.pop() if len(factors) == 1 else None,
        (into[0], into[1]),
        (sum(b.mul * b.dim for b in inputs), sum(b.mul * b.dim for b in outputs), weights),
    )


def apply(
    p: Plan, x: torch.Tensor, w: torch.Tensor, places: Places, name: str, transposed: bool = False
) -> torch.Tensor:
    """x [N, inputs] -> y [N, outputs], or gy -> gx where ``transposed``; rows and columns as in the module.

    ``name`` is the implementation of the products, "" for the default. Differentiable to any order.
    """
    if not direct(x, w):
        return composed(p, x, w, places, name or None, transposed)
    return by_kernels(p, x, w, places, name, transposed)


def by_kernels(
    p: Plan, x: torch.Tensor, w: torch.Tensor, places: Places, name: str, transposed: bool = False
) -> torch.Tensor:
    """``apply`` where ``direct`` holds."""
    if grad_needed(x, w):
        return _Apply.record(p, x, w, *places, name, transposed)
    return _apply(p, x, w, places, name, transposed)


def outer(p: Plan, x: torch.Tensor, gy: torch.Tensor, places: Places, name: str) -> torch.Tensor:
    """The gradient of the weights, [G, columns of the weights]. Differentiable to any order."""
    if not direct(x, gy):
        return _composed_outer(p, x, gy, places, name or None)
    if grad_needed(x, gy):
        return _Outer.record(p, x, gy, *places, name)
    return _outer(p, x, _scaled(p, gy, places, True), places, name)


def direct(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether kernels may be called without the dispatcher, but for autograd in reverse."""
    return (
        not torch.compiler.is_compiling()
        and x.dtype is other.dtype
        and x.dtype in _checks.DTYPES
        and _direct.plain(x, other)
    )


# --- by kernels -------------------------------------------------------------------------------------


def _view(p: Plan, x: torch.Tensor, block: Block) -> torch.Tensor:
    """Columns of x as [N, 2l+1, mul]."""
    row, column = x.stride()
    _, mul, dim = block
    strides = (row, column, dim * column) if p.components_last else (row, mul * column, column)
    return x.as_strided((x.shape[0], dim, mul), strides, x.storage_offset() + block.start * column)


def _matrices(p: Plan, w: torch.Tensor, step: Step, transposed: bool = False) -> torch.Tensor:
    """A step's columns of w [G, ..] as [G, 1, mul_in, mul_out], or with the last two exchanged."""
    group, column = w.stride()
    here, there = p.inputs[step.block_in].mul, p.outputs[step.block_out].mul
    shape, strides = (w.shape[0], 1, here, there), (group, here * there * column, there * column, column)
    if transposed:
        shape, strides = (*shape[:2], there, here), (*strides[:2], column, there * column)
    return w.as_strided(shape, strides, w.storage_offset() + step.start * column)


def _rows(p: Plan, x: torch.Tensor, places: Places, of_output: bool) -> dict[int, torch.Tensor]:
    """The blocks that are multiplied, [N, 2l+1, mul] in the elements' order."""
    blocks, order = (p.outputs if of_output else p.inputs), places.permutation
    return {i: _view(p, x, blocks[i]).index_select(0, order) for i, _ in p.into[not of_output]}


_LEAVES: dict[str, Callable[..., None]] = {
    "grouped_mm": torch.ops.multigemm.native_grouped_mm.default,
    "grouped_mm_wgrad": torch.ops.multigemm.native_grouped_mm_wgrad.default,
}


def _function(op: str, x: torch.Tensor, places: Places, name: str) -> Callable[..., None]:
    if _groups.check_enabled():
        _groups.check_values(op, places.groups, places.ends, x.shape[0])
    return _route.implementation(op, _LEAVES[op], x.device, name)


def _apply(
    p: Plan,
    x: torch.Tensor,
    w: torch.Tensor,
    places: Places,
    name: str,
    transposed: bool,
    scaled: dict[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``scaled``: the rows of x times the common factor, where something else needs them too."""
    run = _function("grouped_mm", x, places, name)
    rows = _rows(p, x, places, transposed) if scaled is None else scaled
    count, into = x.shape[0], p.into[transposed]
    blocks, width = (p.inputs, p.widths[0]) if transposed else (p.outputs, p.widths[1])
    y = x.new_empty((count, width)) if len(into) == len(blocks) else x.new_zeros((count, width))
    for target, steps in into:
        block = blocks[target]
        parts = []
        for step in steps:
            part = x.new_empty((count, block.dim, block.mul))
            matrices = _matrices(p, w, step, transposed)
            run(rows[step.source(transposed)], matrices, places.groups, places.ends, None, part, "")
            parts.append(part if p.common is not None else part.mul_(step.factor))
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        torch.index_select(total, 0, places.inverse, out=_view(p, y, block))
    # What all have in common is multiplied in once, last.
    return y if scaled is not None or p.common is None or p.common == 1 else y.mul_(p.common)


def _scaled(p: Plan, x: torch.Tensor, places: Places, of_output: bool) -> dict[int, torch.Tensor]:
    rows = _rows(p, x, places, of_output)
    if p.common is not None and p.common != 1:
        for part in rows.values():
            part.mul_(p.common)
    return rows


def _outer(
    p: Plan, x: torch.Tensor, scaled: dict[int, torch.Tensor], places: Places, name: str
) -> torch.Tensor:
    """``scaled``: the rows of gy times the common factor; these are fewer than weights."""
    run = _function("grouped_mm_wgrad", x, places, name)
    rows = _rows(p, x, places, False)
    gw = x.new_empty((places.groups.shape[0], p.widths[2]))
    for step in p.steps:
        part = _matrices(p, gw, step)
        run(rows[step.block_in], scaled[step.block_out], places.groups, places.ends, True, part, "")
        if p.common is None:
            part.mul_(step.factor)
    return gw


class _Apply(Function):
    """Recorded where ``direct`` holds."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        p, x, w, *places, name, transposed = arguments
        return _apply(p, x, w, Places(*places), name, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.plan, x, w, permutation, inverse, groups, ctx.ends, *ctx.options = inputs
        _, x_needed, w_needed = ctx.needs_input_grad[:3]
        ctx.save_for_backward(x if w_needed else None, w if x_needed else None, permutation, inverse, groups)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, permutation, inverse, groups = ctx.saved_tensors
        p, (name, transposed) = ctx.plan, ctx.options
        places = Places(permutation, inverse, groups, ctx.ends)
        _, x_needed, w_needed = ctx.needs_input_grad[:3]
        gx = gw = None
        if x_needed and w_needed and not transposed and not torch.is_grad_enabled() and direct(gy, w):
            rows = _scaled(p, gy, places, True)  # once for both
            gx = _apply(p, gy, w, places, name, True, rows)
            gw = _outer(p, x, rows, places, name)
        else:
            if x_needed:
                gx = apply(p, gy, w, places, name, not transposed)
            if w_needed:
                gw = outer(p, gy, x, places, name) if transposed else outer(p, x, gy, places, name)
        return None, gx, gw, *[None] * 6


class _Outer(Function):
    """Recorded where ``direct`` holds."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        p, x, gy, *rest, name = arguments
        places = Places(*rest)
        return _outer(p, x, _scaled(p, gy, places, True), places, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.plan, x, gy, permutation, inverse, groups, ctx.ends, ctx.name = inputs
        _, x_needed, gy_needed = ctx.needs_input_grad[:3]
        ctx.save_for_backward(
            x if gy_needed else None, gy if x_needed else None, permutation, inverse, groups
        )

    @staticmethod
    def backward(ctx: Any, gw: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gy, permutation, inverse, groups = ctx.saved_tensors
        p, places = ctx.plan, Places(permutation, inverse, groups, ctx.ends)
        _, x_needed, gy_needed = ctx.needs_input_grad[:3]
        gx = apply(p, gy, gw, places, ctx.name, True) if x_needed else None
        ggy = apply(p, x, gw, places, ctx.name) if gy_needed else None
        return None, gx, ggy, *[None] * 5


# --- by operators -----------------------------------------------------------------------------------


def _ordered(p: Plan, x: torch.Tensor, places: Places, of_output: bool) -> dict[int, torch.Tensor]:
    """As ``_rows``."""
    blocks, result = (p.outputs if of_output else p.inputs), {}
    for i, _ in p.into[not of_output]:
        start, mul, dim = blocks[i]
        columns = x[:, start : start + mul * dim]
        # Not unflatten: the vmap of `is_grads_batched` has no rule for it.
        if p.components_last:
            columns = columns.reshape(x.shape[0], mul, dim).transpose(1, 2)
        else:
            columns = columns.reshape(x.shape[0], dim, mul)
        result[i] = gather(columns, places.permutation, places.inverse)
    return result


def composed(
    p: Plan,
    x: torch.Tensor,
    w: torch.Tensor,
    places: Places,
    implementation: str | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """``apply`` in terms of operators, which everything that torch has can look at."""
    rows = _ordered(p, x, places, transposed)
    blocks = p.inputs if transposed else p.outputs
    # All pieces at once: the gradient of a split is one concatenation, those of slices are added up.
    pieces = w.split([p.inputs[s.block_in].mul * p.outputs[s.block_out].mul for s in p.steps], 1)
    options: Any = {_rules.groups_name(places.ends): places.groups, "implementation": implementation}
    outputs = []
    for target, block in enumerate(blocks):
        total = None
        for step, piece in zip(p.steps, pieces, strict=True):
            if step.target(transposed) != target:
                continue
            matrices = piece.unflatten(1, (1, -1, p.outputs[step.block_out].mul))
            matrices = matrices.mT if transposed else matrices
            y = grouped_mm(rows[step.source(transposed)], matrices, **options)
            y = y * step.factor
            total = y if total is None else total + y
        if total is None:
            outputs.append(x.new_zeros(x.shape[0], block.mul * block.dim))
            continue
        if p.components_last:
            total = total.transpose(1, 2)
        ordered = gather(total, places.inverse, places.permutation)
        outputs.append(ordered.reshape(x.shape[0], block.mul * block.dim))
    return torch.cat(outputs, 1) if outputs else x.new_zeros(x.shape[0], 0)


def _composed_outer(
    p: Plan, x: torch.Tensor, gy: torch.Tensor, places: Places, implementation: str | None
) -> torch.Tensor:
    rows, grads = _ordered(p, x, places, False), _ordered(p, gy, places, True)
    options: Any = {
        _rules.groups_name(places.ends): places.groups,
        "sum_batch": True,
        "implementation": implementation,
    }
    count, pieces = places.groups.shape[0], []
    for step in p.steps:
        gw = grouped_mm_wgrad(rows[step.block_in], grads[step.block_out], **options) * step.factor
        pieces.append(gw.reshape(count, gw.shape[2] * gw.shape[3]))
    return torch.cat(pieces, 1) if pieces else x.new_zeros(count, 0)
