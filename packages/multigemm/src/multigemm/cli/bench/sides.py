"""What the topics of equivariant layers measure: one layer on one set of atoms, by several implementations.

Every implementation gets x, and the cotangents, in the layout that it takes best; bringing them there is
not timed. The four operations are those of an inference step, of molecular dynamics, and of two kinds of
training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from .cases import SEED

OPS = ("forward", "forward+backward x", "forward+backward", "double backward")
FROZEN = OPS[:2]
"""Operations in which no weight requires a gradient."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
CHECKED = 16
"""Atoms of the rarest element, whose values and gradients are compared with float64."""


@dataclass(frozen=True)
class Model:
    name: str
    elements: int
    channels: int
    outputs: tuple[str, ...]

    def shape(self) -> str:
        return f"G={self.elements} C={self.channels} out {'+'.join(self.outputs)}"

    def irreps(self, blocks: Sequence[str]) -> str:
        return "+".join(f"{self.channels}x{block}" for block in blocks)


@dataclass(frozen=True)
class Data:
    """What ``data/mace.json`` holds."""

    models: tuple[Model, ...]
    inputs: tuple[str, ...]
    atoms: tuple[int, ...]
    few: int


@lru_cache(maxsize=1)
def data() -> Data:
    found = json.loads(resources.files("multigemm").joinpath("data/mace.json").read_text(encoding="utf-8"))
    models = (Model(**{**entry, "outputs": tuple(entry["outputs"])}) for entry in found["models"])
    return Data(tuple(models), tuple(found["inputs"]), tuple(found["atoms"]), found["few"])


@dataclass(frozen=True)
class Atoms:
    """``count`` atoms of three elements ("few") or of all that the model knows ("all")."""

    count: int
    kind: str

    def name(self) -> str:
        return f"{self.count}-{self.kind}"

    def draw(self, elements: int) -> tuple[torch.Tensor, int]:
        """[N] labels on the CPU, uniform over the elements that are present but one, of which there are 16
        atoms (or fewer, of few atoms); and that one."""
        generator = torch.Generator().manual_seed(SEED)
        places = torch.randperm(elements, generator=generator)
        places = places[: min(data().few, elements) if self.kind == "few" else elements]
        rare = int(places[-1])
        others = places[:-1] if len(places) > 1 else places
        labels = others[torch.randint(len(others), (self.count,), generator=generator)]
        labels[: min(CHECKED, self.count)] = rare
        return labels[torch.randperm(self.count, generator=generator)], rare


Change = Callable[[torch.Tensor], torch.Tensor]


def _same(t: torch.Tensor) -> torch.Tensor:
    return t


@dataclass
class Side:
    """One implementation with its own weights, equal to the others', and its own layout of x and y."""

    call: Change
    weights: list[torch.Tensor]
    x: torch.Tensor
    gy: torch.Tensor
    u: torch.Tensor
    """A direction in x, for the double backward pass."""
    x_back: Change = _same
    """From its layout to the one that values are compared in."""
    y_back: Change = _same
    comparable: bool = True
    """Whether its weights lie as the reference's, so that their gradients can be compared one by one."""


@dataclass
class Outputs:
    """What an operation gives; ``w`` has a gradient for each weight."""

    y: torch.Tensor | None = None
    x: torch.Tensor | None = None
    gy: torch.Tensor | None = None
    w: list[torch.Tensor | None] = field(default_factory=list)


def evaluate(side: Side, op: str) -> Outputs:
    """One call of an operation, from x on."""
    if op == "forward":
        with torch.no_grad():
            return Outputs(y=side.call(side.x))
    x = side.x.detach().requires_grad_()
    weights = [w for w in side.weights if w.requires_grad]
    y = side.call(x)
    if op != "double backward":
        gx, *gw = torch.autograd.grad(y, [x, *weights], side.gy)
        return Outputs(y, gx, None, list(gw))
    gy = side.gy.detach().requires_grad_()
    (gx,) = torch.autograd.grad(y, x, gy, create_graph=True)
    second = torch.autograd.grad(gx, [x, gy, *weights], side.u, allow_unused=True)
    return Outputs(None, second[0], second[1], list(second[2:]))


def prepare(side: Side, op: str) -> None:
    """Let the weights require gradients, or not, as the operation wants it."""
    for w in side.weights:
        w.requires_grad_(op not in FROZEN)


@dataclass
class Problem:
    """One layer on one set of atoms in one dtype."""

    labels: torch.Tensor
    rare: int
    ours: Side
    reference: Side
    """In float64, of the atoms of the rarest element alone: x is that of ``rows``, weights those of it."""
    peers: dict[str, Callable[[], Side]]
    """Ways to make the other implementations; an exception is the reason why one is missing."""
    kernel: str
    floor: Callable[[str], tuple[float, float]]
    """Operations and bytes of an operation."""
    temporaries: Callable[[str, str], float]
    """Bytes that a peer needs for an operation, roughly; only to leave out what this machine has not."""

    def rows(self) -> torch.Tensor:
        return (self.labels == self.rare).nonzero().squeeze(1)


def errors(p: Problem, side: Side, op: str, found: Outputs, expected: Outputs) -> float:
    """The largest difference from float64 over the largest value: of the rarest element's atoms and weights.

    Gradients of the weights of elements without atoms have to be zero. NaN counts as an infinite error.
    """
    rows = p.rows()
    pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    for got, want, back in (
        (found.y, expected.y, side.y_back),
        (found.x, expected.x, side.x_back),
        (found.gy, expected.gy, side.y_back),
    ):
        pairs.append((None if got is None else back(got).index_select(0, rows), want))
    if side.comparable:
        absent = torch.ones(_elements(p), dtype=torch.bool, device=p.labels.device)
        absent[p.labels.unique()] = False
        for g, want in zip(found.w, expected.w, strict=True):
            pairs.append((None if g is None else g[p.rare], want))
            if g is not None and bool((g[absent] != 0).any()):
                return float("inf")
    worst = 0.0
    for got, want in pairs:
        if got is None and want is None:
            continue
        a = torch.zeros_like(want) if got is None else got.detach()  # type: ignore[arg-type]  # one is there
        b = torch.zeros_like(a) if want is None else want.detach()
        scale = float(b.abs().max()) if b.numel() else 0.0
        value = float((a.double() - b.double()).abs().max()) / (scale or 1.0) if b.numel() else 0.0
        worst = max(worst, value if value == value else float("inf"))
    return worst


def _elements(p: Problem) -> int:
    return int(p.ours.weights[0].shape[0])


def inner(side: Side, found: Outputs) -> tuple[float, float]:
    """The sum over all weights of gradient times weight, and the sum of its summands' sizes.

    It is the same for every set of weights that stands linearly for the same map, whatever its layout.
    """
    weights = [w for w in side.weights if w.requires_grad]
    products = [
        g.detach().double() * w.detach().double()
        for g, w in zip(found.w, weights, strict=True)
        if g is not None
    ]
    return sum(float(t.sum()) for t in products), sum(float(t.abs().sum()) for t in products)


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal data, drawn in float64 on the CPU: the same values in every dtype and on every device."""
    generator = torch.Generator().manual_seed(seed)
    made: Any = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return made.to(device, dtype)  # type: ignore[no-any-return]
