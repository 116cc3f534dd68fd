"""What group sizes and offsets mean, and their check by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _environment
from ._errors import GroupSizesError

if TYPE_CHECKING:
    import torch


def spans(groups: torch.Tensor, offsets: bool, rows: int) -> tuple[list[tuple[int, int]], int]:
    """Row range of each group, and R, the end of the last one.

    groups [G] integers, on any device (reading them from a device synchronises); sizes, or cumulative
    ends where ``offsets``. Negative sizes count as zero, a falling offset as an empty group, and no
    range passes ``rows``: the clamping that every backend repeats.
    """
    end = 0
    result = []
    for value in groups.tolist():
        start = end
        end = min(max(start, value) if offsets else start + max(value, 0), rows)
        result.append((start, end))
    return result, end


def check_enabled() -> bool:
    return _environment.check()


def check_values(op: str, groups: Any, offsets: bool, rows: int) -> None:
    """Raise where a size is negative or the groups pass the rows. Synchronises with the device."""
    total = 0
    for index, value in enumerate(groups.tolist()):
        if offsets:
            if value < total:
                raise GroupSizesError(
                    f"{op}: offsets must not fall, got offsets[{index}] = {value} after {total}."
                )
            total = value
        else:
            if value < 0:
                raise GroupSizesError(
                    f"{op}: group_sizes must not be negative, got group_sizes[{index}] = {value}."
                )
            total += value
        if total > rows:
            name = "offsets" if offsets else "group_sizes"
            raise GroupSizesError(
                f"{op}: the groups must fit into the N = {rows} rows of x, "
                f"got {total} rows up to and with {name}[{index}] = {value}."
            )
