"""What other packages add by entry points, found on first need and loaded one by one.

A package that fails to load is reported to who asked for it by name, and disturbs nobody else.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ._errors import OptionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def names(group: str) -> dict[str, EntryPoint]:
    """Entry points of ``group`` by name. The scan costs tens of milliseconds, once per process."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=group)}


@cache
def load(group: str, name: str) -> Any:
    point = names(group)[name]
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist is not None else "an unknown package"
        raise OptionError(
            f"{name!r} of the entry points {group!r}, provided by {package} as {point.value!r}, "
            f"fails to load: {type(error).__name__}: {error}"
        ) from error
