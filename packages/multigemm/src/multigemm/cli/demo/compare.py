"""What both parts of the demo share: differences, side-by-side times, and one line of the report each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import _memory
from ..bench import timing

Outputs = Sequence[torch.Tensor]


@dataclass
class Agreement:
    """The largest difference of one quantity over its largest value, and what is allowed."""

    quantity: str
    difference: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance


@dataclass
class Cost:
    """Median milliseconds and peak bytes of the grouped form and of the form it replaces."""

    what: str
    grouped_ms: float
    other_ms: float
    grouped_bytes: int
    other_bytes: int


@dataclass
class Part:
    """The outcome of one part of the demo."""

    title: str
    other: str
    """What the grouped form is compared with."""
    agreements: list[Agreement] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def agree(self, quantity: str, got: Outputs, expected: Outputs, tolerance: float) -> None:
        """Note the largest difference of the tensors; a fault where it is above the tolerance or not a
        number. Each tensor is measured against its own largest value."""
        differences = [relative_difference(a, b) for a, b in zip(got, expected, strict=True)]
        found = Agreement(quantity, max(differences), tolerance)
        self.agreements.append(found)
        if not found.holds:
            self.faults.append(
                f"{quantity}: differs from {self.other} by {found.difference:.1e}, allowed is {tolerance:.0e}"
            )


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b|; infinite where the shapes differ or a value is not a number."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    scale = float(b.detach().double().abs().max())
    value = difference / scale if scale else difference
    return value if value == value else float("inf")


def cost(
    what: str,
    grouped: Callable[[], object],
    other: Callable[[], object],
    repeats: int = 15,
    budget_s: float = 8.0,
) -> Cost:
    """Both calls sampled in turns on the CPU, then run once more each under the allocator's record."""
    cpu = torch.device("cpu")
    times = timing.side_by_side(cpu, {"grouped": grouped, "other": other}, repeats, budget_s)
    peaks = [_memory.peak_bytes(call, cpu) for call in (grouped, other)]
    return Cost(what, times["grouped"].ms, times["other"].ms, *peaks)
