"""Labels of rows, and rows brought into the order of their labels and back.

The gradient of a gather by a permutation is the gather by its inverse: no sum, so nothing depends on the
order in which a GPU adds, and derivatives of any order are gathers again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _checks, _environment
from .._errors import DeviceError, DTypeError, OptionError, ShapeError
from ..ops import GroupOrder, sort_by_group
from ..ops._library import forward_mode, outer_tangents, signed
from ..ops.sort_by_group import order_and_ends

_INTEGERS = (torch.int64, torch.int32)


class Places(NamedTuple):
    """How rows are brought into the order of their elements and back: integers, in what type they come."""

    permutation: torch.Tensor
    inverse: torch.Tensor
    groups: torch.Tensor
    """[G], sizes or ends."""
    ends: bool


def labels_of(op: str, attributes: torch.Tensor, x: torch.Tensor, elements: int) -> torch.Tensor:
    """[N] integers from integer labels [N] or one-hot rows [N, G] of floats; a row of zeros gets -1.

    A value other than one-hot cannot be seen without reading it; ``MULTIGEMM_CHECK=1`` reads and refuses it.
    """
    if (
        type(attributes) is torch.Tensor
        and attributes.dtype in _INTEGERS
        and attributes.shape == x.shape[:1]
        and attributes.device == x.device
    ):
        return attributes  # nearly every call
    if not isinstance(attributes, torch.Tensor):
        raise DTypeError(f"{op}: labels must be a tensor, got {type(attributes).__name__}.")
    if attributes.device != x.device:
        raise DeviceError(
            f"{op}: labels must be on the device of x, {x.device}, got {attributes.device}; "
            f"move them with labels.to(x.device)."
        )
    rows = x.shape[0]
    if attributes.dim() == 1 and not attributes.is_floating_point():
        if attributes.dtype == torch.bool or attributes.is_complex():
            raise DTypeError(f"{op}: labels must be integers [N] or one-hot [N, G], got {attributes.dtype}.")
        if attributes.shape[0] != rows:
            raise ShapeError(f"{op}: labels must have shape [{rows}], got {list(attributes.shape)}.")
        return attributes
    if attributes.dim() != 2 or tuple(attributes.shape) != (rows, elements):
        raise ShapeError(
            f"{op}: labels must be integers [{rows}] or one-hot [{rows}, {elements}], "
            f"got {attributes.dtype} {list(attributes.shape)}."
        )
    values = attributes.detach()
    if elements == 0:
        return torch.full((rows,), -1, dtype=torch.int64, device=x.device)
    top, labels = values.max(-1)
    if _environment.check() and not torch.compiler.is_compiling():
        right = ((values == 0) | (values == 1)).all() & (values.sum(-1) <= 1).all()
        if not bool(right):
            raise OptionError(
                f"{op}: a row of labels is not one-hot; mixtures of elements are not computed here."
            )
    return torch.where(top > 0, labels, -1)


def order_of(
    op: str, attributes: torch.Tensor | None, order: GroupOrder | None, x: torch.Tensor, elements: int
) -> GroupOrder:
    """``order`` where it is given, else that of the labels."""
    if order is not None:
        for name, tensor in zip(("permutation", "group_sizes"), order[:2], strict=True):
            if tensor.device != x.device:
                raise DeviceError(
                    f"{op}: order.{name} must be on the device of x, {x.device}, got {tensor.device}."
                )
        if tuple(order.permutation.shape) != (x.shape[0],) or tuple(order.group_sizes.shape) != (elements,):
            raise ShapeError(
                f"{op}: order must be of {x.shape[0]} rows and {elements} elements, got "
                f"{list(order.permutation.shape)} and {list(order.group_sizes.shape)}."
            )
        return order
    if attributes is None:
        raise OptionError(f"{op}: give labels or order.")
    return sort_by_group(labels_of(op, attributes, x, elements), elements)


def places_of(
    op: str, attributes: torch.Tensor | None, order: GroupOrder | None, x: torch.Tensor, elements: int
) -> Places:
    """What ``order_of`` says, found with fewer launches where there are labels to sort."""
    if order is None and attributes is not None:
        return Places(*order_and_ends(labels_of(op, attributes, x, elements), elements), True)
    permutation, sizes, inverse = order_of(op, attributes, order, x, elements)
    _checks.groups(op, x, sizes, False)
    return Places(permutation, inverse, sizes, False)


def gather(x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """x[there]; ``there`` [N] is a permutation of the rows, ``back`` its inverse."""
    # torch.compile traces no function that has a rule for tangents.
    function = _GatherWithTangents if not torch.compiler.is_compiling() and forward_mode() else _Gather
    result: torch.Tensor = function.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


@signed
class _Gather(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, there)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        there, back = ctx.saved_tensors
        return gather(grads[0], back, there), None, None


class _GatherWithTangents(_Gather):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        with outer_tangents():
            return gather(tangents[0], *ctx.saved_for_forward)
