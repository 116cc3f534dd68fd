"""Which way a contraction is computed, and the fused one: the polynomial by one kernel, without a temporary.

``indexed_polynomial`` writes y once, where the grouped way keeps Q / D times the size of x, so it is taken
wherever a backend has its kernels; docs/equivariant.md has the measured times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _choice, _route_polynomial
from .._errors import OptionError
from ..ops import GroupOrder
from ._irreps import Irreps
from ._terms import Shared, Terms

PATHS = ("fused", "grouped")
_FUSED_DTYPES = (torch.float64, torch.float32)


class ContractionExplanation(NamedTuple):
    """How a contraction would be computed. ``str()`` of it is text."""

    path: str
    """"fused" or "grouped"."""
    source: str
    """What decided: "argument", "context", "environment", "property" or "default"."""
    terms: int
    """Terms of the polynomial, of all outputs."""
    reason: str

    def __str__(self) -> str:
        return f"SymmetricContraction: {self.path} ({self.source}), {self.terms} terms: {self.reason}"


def choose(argument: str | None, device: torch.device, dtype: torch.dtype) -> tuple[str, str, str]:
    """The way, what decided, and why.

    The module's own argument comes first. Where a pin of the products names a kernel that the polynomial has
    not ("torch", "blas", "reference"), the grouped way is taken, whose product has it.
    """
    if argument is not None:
        return argument, "argument", "asked for"
    if dtype not in _FUSED_DTYPES:
        return "grouped", "default", f"the fused kernels compute float64 and float32, not {dtype}"
    choice = _choice.resolve("", _choice.pinned(), _route_polynomial.OPERATOR, device)
    if choice.name not in ("", "native", "simt"):
        return "grouped", choice.source, f"products are pinned to {choice.name!r}"
    why = _route_polynomial.why_not(device)
    if why:
        return "grouped", "default", why
    return "fused", choice.source, "one kernel, no temporary"


def path_of(argument: str | None, device: torch.device, dtype: torch.dtype) -> str:
    if argument is not None:
        return argument
    if dtype in _FUSED_DTYPES and _route_polynomial.at_once(device, _choice.pinned()) is not None:
        return "fused"  # nearly every call, without the words that `explain` needs
    return choose(argument, device, dtype)[0]


# torch.compile takes the answer at tracing for a constant, as that of `multigemm.use`.
path_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked(name: str | None) -> str | None:
    if name is not None and name not in PATHS:
        raise OptionError(
            f'SymmetricContraction: implementation must be "fused", "grouped" or None, got {name!r}.'
        )
    return name


def places(irreps: Irreps, channels: int, layout: str) -> list[list[int]]:
    """For each component its column of channel 0 and the step from channel to channel."""
    result, start, component = [], 0, 0
    for block in irreps:
        for m in range(block.ir.dim):
            if layout == "ir_mul":
                result.append([component * channels, 1])
            else:
                result.append([start + m, block.ir.dim])
            component += 1
        start += channels * block.ir.dim
    return result


def tables(
    terms: Terms,
    weights: Shared,
    irreps_in: Irreps,
    irreps_out: Irreps,
    channels: int,
    layouts: tuple[str, str],
) -> dict[str, torch.Tensor]:
    """The tensors of ``indexed_polynomial``: two tables of places, for x [N, C, D] and for x in columns."""
    outputs = places(irreps_out, channels, layouts[1])
    width = terms.width
    shapes = {
        "places_whole": [[i, width] for i in range(width)] + outputs,
        "places": places(irreps_in, channels, layouts[0]) + outputs,
    }
    made = {name: torch.tensor(value, dtype=torch.int64).view(-1, 2) for name, value in shapes.items()}
    entries = {"last": weights.last, "entries": weights.entries, "entry_ends": weights.entry_ends}
    return {"heads": terms.heads, "pairs": weights.pairs, **entries, **made}


def labels_from(order: GroupOrder) -> torch.Tensor:
    """[N] int64: the label of each row, G of those without one. Reads nothing back."""
    rows = torch.arange(order.permutation.shape[0], device=order.permutation.device)
    sorted_labels = torch.searchsorted(order.group_sizes.cumsum(0), rows, right=True)
    return sorted_labels.index_select(0, order.inverse)


def renumbered(labels: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels 0 .. G-1 that occur, and each row's number among them, -1 for rows without one. For labels
    on the CPU, where that costs no synchronisation."""
    known = (labels >= 0) & (labels < groups)
    elements, numbers = torch.unique(torch.where(known, labels, 0), return_inverse=True)
    return elements[:groups], torch.where(known, numbers, -1)
