"""Rules of a call that need no framework: shapes, options, and which of sizes and offsets is given.

Shared by the checks of tensors (``_checks``) and of other libraries' arrays (``interop``), so that both
refuse a bad call with the same sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import GroupSizesError, OptionError, ShapeError

DTYPE_NAMES = "float64, float32, float16 or bfloat16"
PRECISIONS = (None, "ieee", "tf32")

X_LAYOUT = "[N, K] or [N, B, K]"
W_LAYOUT = "[G, K, M], or [G, B, K, M] where x is [N, B, K]"
GY_LAYOUT = "[N, M], or [N, B, M] where x is [N, B, K]"

Shape = Sequence[int]


def show(shape: Shape) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def bias_layout(x: Shape) -> str:
    return "[G, M]" if len(x) == 2 else "[G, B, M] or [G, 1, M]"


def dims(op: str, name: str, shape: Shape, allowed: tuple[int, ...], layout: str) -> None:
    if len(shape) not in allowed:
        raise ShapeError(f"{op}: {name} must have shape {layout}, got {show(shape)}.")


def one_of(op: str, group_sizes: Any, offsets: Any) -> tuple[Any, bool]:
    """The one given of ``group_sizes`` and ``offsets``, and whether it is ``offsets``."""
    if (group_sizes is None) == (offsets is None):
        given = "neither" if group_sizes is None else "both"
        raise GroupSizesError(f"{op}: give exactly one of group_sizes and offsets, got {given}.")
    return (group_sizes, False) if offsets is None else (offsets, True)


def groups_name(offsets: bool) -> str:
    return "offsets" if offsets else "group_sizes"


def options(op: str, precision: object, implementation: object) -> None:
    if precision not in PRECISIONS:
        raise OptionError(f'{op}: precision must be None, "ieee" or "tf32", got {precision!r}.')
    if implementation is not None and not isinstance(implementation, str):
        raise OptionError(f"{op}: implementation must be a name or None, got {implementation!r}.")


def w_fits_x(op: str, x: Shape, w: Shape) -> None:
    if len(w) != len(x) + 1:
        want = (
            "[G, K, M] where x is [N, K]"
            if len(x) == 2
            else "[G, B, K, M] or [G, 1, K, M] where x is [N, B, K]"
        )
        raise ShapeError(f"{op}: w must have shape {want}, got w {show(w)} and x {show(x)}.")


def grouped_mm(op: str, x: Shape, w: Shape, count: int, offsets: bool) -> None:
    """x [N,(B,)K] and w [G,(B|1,)K,M] for ``count`` groups; the numbers of dimensions fit."""
    if w[0] != count:
        raise ShapeError(
            f"{op}: w must hold one matrix for each of the {count} entries of {groups_name(offsets)}, "
            f"got w {show(w)}."
        )
    if w[-2] != x[-1]:
        raise ShapeError(
            f"{op}: the inner sizes K must agree: x {show(x)} has K = {x[-1]}, w {show(w)} has K = {w[-2]}."
        )
    if len(x) == 3 and w[1] != 1 and w[1] != x[1]:
        raise ShapeError(
            f"{op}: w must have B = {x[1]} as x {show(x)} has, or 1 to share one matrix over B, "
            f"got w {show(w)}."
        )


def bias(op: str, x: Shape, w: Shape, bias: Shape) -> None:
    """bias [G,(B|1,)M]; its number of dimensions fits."""
    fits = bias[0] == w[0] and bias[-1] == w[-1]
    if len(x) == 3 and bias[1] != 1 and bias[1] != x[1]:
        fits = False
    if not fits:
        batch = "" if len(x) == 2 else f"{x[1]} or 1, "
        raise ShapeError(f"{op}: bias must have shape [{w[0]}, {batch}{w[-1]}], got {show(bias)}.")


def wgrad(op: str, x: Shape, gy: Shape) -> None:
    if len(gy) != len(x) or gy[:-1] != x[:-1]:
        want = f"[{', '.join(str(n) for n in x[:-1])}, M]"
        raise ShapeError(f"{op}: gy must have shape {want} to go with x {show(x)}, got {show(gy)}.")


def sum_batch(op: str, x: Shape) -> None:
    if len(x) == 2:
        raise ShapeError(f"{op}: sum_batch needs x [N, B, K], got x with two dimensions.")
