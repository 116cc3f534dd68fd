"""``sort_by_group``: from a label per row to row blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._errors import DTypeError, OptionError, ShapeError


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
    keys = labels.to(torch.int64)
    keys = torch.where((keys < 0) | (keys >= num_groups), num_groups, keys)
    ordered, permutation = torch.sort(keys, stable=True)
    # Ends of the groups by binary search: deterministic, unlike a count by atomics, and no read-back
    # of the largest label, which bincount needs.
    bounds = torch.arange(num_groups + 1, device=keys.device)
    starts = torch.searchsorted(ordered, bounds)
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.shape[0], device=keys.device)
    return GroupOrder(permutation, starts.diff(), inverse)
