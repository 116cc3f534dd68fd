"""``sort_by_group``: from a label per row to row blocks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .. import _choice, _dispatch
from .._errors import DTypeError, OptionError, ShapeError
from . import _direct

_BY_BACKEND = frozenset(("", *_choice.NATIVE))


class GroupOrder(NamedTuple):
    """How rows are brought into group order, and back.

    ``x[order.permutation]`` has its groups in order, ``order.group_sizes`` rows each, and
    ``y[order.inverse]`` undoes it. Sort once and share the result between layers.
    """

    permutation: torch.Tensor
    """[N] int64: the row that goes to each place; equal labels keep their order."""
    group_sizes: torch.Tensor
    """[G] int64: rows of each group."""
    inverse: torch.Tensor
    """[N] int64: the place that each row went to."""


def sort_by_group(labels: torch.Tensor, num_groups: int) -> GroupOrder:
    """Bring rows into group order. Runs on the labels' device and never synchronises with it.

    Args:
        labels: [N] integers, the group of each row. A label outside 0 .. num_groups - 1 (-1 say, for a
            dropped token) belongs to no group: its row is placed past the last group, where products
            give zeros.
        num_groups: G.

    Returns:
        ``GroupOrder(permutation, group_sizes, inverse)``.

    Raises:
        ShapeError, DTypeError, OptionError: labels that are not 1-D integers, a negative number of groups.
    """
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_complex():
        given = labels.dtype if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise DTypeError(f"sort_by_group: labels must be an integer tensor [N], got {given}.")
    if labels.dtype == torch.bool:
        raise DTypeError("sort_by_group: labels must be an integer tensor [N], got torch.bool.")
    if labels.dim() != 1:
        raise ShapeError(f"sort_by_group: labels must have shape [N], got {list(labels.shape)}.")
    if num_groups < 0:
        raise OptionError(f"sort_by_group: num_groups must not be negative, got {num_groups}.")
    # Rows without a group stand in their own order, as stable sorting leaves equal labels.
    ordered, permutation, inverse = _sorted(labels.to(torch.int64).clamp(max=num_groups), num_groups)
    # Ends of the groups by binary search: deterministic, unlike a count by atomics, and no read-back
    # of the largest label, which bincount needs.
    starts = torch.searchsorted(ordered, torch.arange(num_groups + 1, device=labels.device))
    return GroupOrder(permutation, starts.diff(), inverse)


def _sorted(labels: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The labels in order, with negative ones past the last group, the permutation and its inverse."""
    keys = labels if labels.dtype is torch.int64 else labels.to(torch.int64)
    ordered, permutation = torch.where(keys < 0, groups, keys).sort(stable=True)
    numbers = torch.arange(permutation.shape[0], device=labels.device)
    return ordered, permutation, torch.empty_like(permutation).scatter_(0, permutation, numbers)


# What the kernel takes: MG_MOE_MOST_EXPERTS, and places of 32 bits.
_MOST_GROUPS, _MOST_ROWS = 1024, 2**31 - 1


@functools.cache
def _has_kernel(kind: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return kind == "cuda" and has("multigemm::native_moe_route", "CUDA")


def _by_kernel(labels: torch.Tensor, groups: int) -> bool:
    """Whether a backend's kernel finds the order, in one launch or two: on a GPU. On the CPU PyTorch's sort
    is faster."""
    kind = labels.device.type
    return (
        kind != "cpu"
        and labels.dtype is torch.int64
        and 0 < groups <= _MOST_GROUPS
        and labels.shape[0] <= _MOST_ROWS
        and _choice.environment() in _BY_BACKEND
        and _choice.pinned() in _BY_BACKEND
        and _direct.plain(labels)
        and _dispatch.backend_for(kind) is not None
        and _has_kernel(kind)
    )


def order_and_ends(labels: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The permutation, its inverse and the end [G] of each group's rows, for labels that fit; rows without a
    group are past the last one. In integers of 32 bits where a backend's kernel finds them."""
    if not torch.compiler.is_compiling() and _by_kernel(labels, groups):
        count = labels.shape[0]
        places = labels.new_empty((2, count), dtype=torch.int32)
        permutation, inverse = places[0], places[1]
        ends = labels.new_empty((groups,), dtype=torch.int32)
        torch.ops.multigemm.native_moe_route.default(
            None, None, labels.contiguous().view(count, 1), None, permutation, inverse, ends, None, None,
            0, False, 1, 1, 0, 1.0,
        )  # fmt: skip
        return permutation, inverse, ends
    ordered, permutation, inverse = _sorted(labels, groups)
    ends = torch.searchsorted(ordered, torch.arange(1, groups + 1, device=labels.device))
    return permutation, inverse, ends
