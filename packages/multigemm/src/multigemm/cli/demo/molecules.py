"""An energy of real molecules through one linear map per chemical element, and its derivatives.

    x[n,b,k] = sum over the neighbours j of n: R_b(|r_nj|) Y_k(r_nj)    radial basis, solid harmonics
    y[n] = x[n] w[element of n]                                         B channels, 16 -> M: the product
    E = sum over n, b, m: v[b,m] tanh(y[n,b,m])
    forces F = -dE/dr;  loss = mean (F - F0)^2;  training needs dloss/dw, a second derivative

Equivariant codes write the product as an einsum with one-hot node attributes, whose work and memory grow
with the number of elements known. Here the atoms are sorted by element instead. The molecules are the
148 of the G2 set that ASE bundles, repeated with small displacements; nothing is fitted to measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import multigemm

from .._support import require
from .compare import Part, cost

TOLERANCE = 1e-10
CUTOFF = 5.0
"""In angstrom."""

Product = Callable[[torch.Tensor, torch.Tensor, "Batch"], torch.Tensor]


@dataclass(frozen=True)
class Config:
    atoms: int = 1500
    """At least so many atoms; the set is repeated as a whole."""
    channels: int = 32
    out: int = 32
    displacement: float = 0.05
    """Standard deviation of the displacements, in angstrom."""
    seed: int = 0
    repeats: int = 9


@dataclass
class Batch:
    """A molecules, padded to P places each. ``real`` marks places with an atom; N atoms in all."""

    positions: torch.Tensor
    """[A, P, 3] in angstrom, float64."""
    real: torch.Tensor
    """[A, P] bool."""
    element: torch.Tensor
    """[N] int64, 0 .. G-1, in the order of ``symbols``."""
    symbols: list[str]
    order: multigemm.ops.GroupOrder
    one_hot: torch.Tensor
    """[N, G]."""

    @property
    def atoms(self) -> int:
        return self.element.shape[0]


@dataclass
class Weights:
    w: torch.Tensor
    """[G, B, 16, M]"""
    v: torch.Tensor
    """[B, M]"""
    target: torch.Tensor
    """[A, P, 3]: forces to be trained towards; random, as the demo is about derivatives."""
    direction: torch.Tensor
    """[A, P, 3]: the vector that the Hessian is applied to."""


def load(config: Config) -> Batch:
    """Molecules of the G2 set with more than one atom, repeated until there are atoms enough."""
    g2 = require("ase.collections", "demo", "The demo's molecules").g2
    symbols_of = [list(g2[name].symbols) for name in g2.names]
    places_of = [torch.tensor(g2[name].positions, dtype=torch.float64) for name in g2.names]
    molecules = [(s, p) for s, p in zip(symbols_of, places_of, strict=True) if len(s) > 1]
    once = sum(len(s) for s, _ in molecules)
    molecules *= max(1, -(-config.atoms // once))
    generator = torch.Generator().manual_seed(config.seed)
    widest = max(len(s) for s, _ in molecules)
    positions = torch.zeros(len(molecules), widest, 3, dtype=torch.float64)
    real = torch.zeros(len(molecules), widest, dtype=torch.bool)
    for i, (symbols, places) in enumerate(molecules):
        positions[i, : len(symbols)] = places
        real[i, : len(symbols)] = True
    positions += config.displacement * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
    names = sorted({s for symbols, _ in molecules for s in symbols})
    element = torch.tensor([names.index(s) for symbols, _ in molecules for s in symbols])
    one_hot = torch.nn.functional.one_hot(element, len(names)).to(torch.float64)
    order = multigemm.sort_by_group(element, len(names))
    return Batch(positions, real, element, names, order, one_hot)


def make_weights(config: Config, batch: Batch) -> Weights:
    generator = torch.Generator().manual_seed(config.seed + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    w = normal(len(batch.symbols), config.channels, 16, config.out) * 0.25
    v = normal(config.channels, config.out) / (config.channels * config.out) ** 0.5
    return Weights(w, v, normal(*batch.positions.shape), normal(*batch.positions.shape))


def features(positions: torch.Tensor, batch: Batch, channels: int) -> torch.Tensor:
    """positions [A,P,3] -> x [N,B,16]; twice differentiable, also where a place has no neighbour."""
    apart = positions.unsqueeze(1) - positions.unsqueeze(2)
    pair = batch.real.unsqueeze(1) & batch.real.unsqueeze(2)
    pair = pair & ~torch.eye(positions.shape[1], dtype=torch.bool)
    # Where there is no pair any vector of length one does: its root is smooth, its weight is zero.
    apart = torch.where(pair.unsqueeze(-1), apart, torch.tensor([1.0, 0.0, 0.0], dtype=positions.dtype))
    distance = apart.square().sum(-1).sqrt()
    inside = (1 - distance / CUTOFF).clamp(min=0).pow(3) * pair
    frequency = torch.arange(1, channels + 1, dtype=positions.dtype) * (torch.pi / CUTOFF)
    radial = torch.sin(distance.unsqueeze(-1) * frequency) / distance.unsqueeze(-1) * inside.unsqueeze(-1)
    angular = harmonics(apart / distance.unsqueeze(-1))
    return (radial.mT @ angular)[batch.real]


def harmonics(u: torch.Tensor) -> torch.Tensor:
    """Real spherical harmonics of unit vectors [..., 3] for l = 0 .. 3, up to a constant each: [..., 16]."""
    x, y, z = u.unbind(-1)
    one = torch.ones_like(x)
    xx, yy, zz = x * x, y * y, z * z
    second = (x * y, y * z, 3 * zz - 1, x * z, xx - yy)
    third = (
        y * (3 * xx - yy),
        x * y * z,
        y * (5 * zz - 1),
        z * (5 * zz - 3),
        x * (5 * zz - 1),
        z * (xx - yy),
        x * (xx - 3 * yy),
    )
    return torch.stack((one, y, z, x, *second, *third), -1)


def grouped_product(x: torch.Tensor, w: torch.Tensor, batch: Batch) -> torch.Tensor:
    """x [N,B,16], w [G,B,16,M] -> y [N,B,M]: atoms sorted by element, one grouped product."""
    order = batch.order
    return multigemm.grouped_mm(x[order.permutation], w, order.group_sizes)[order.inverse]


def one_hot_product(x: torch.Tensor, w: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The same as "ng,gbkm,nbk->nbm" over one-hot attributes, in the order of least work, which is what
    opt_einsum chooses; from left to right it would hold a matrix for each atom."""
    return torch.einsum("ngbk,gbkm->nbm", torch.einsum("ng,nbk->ngbk", batch.one_hot, x), w)


@dataclass
class Derivatives:
    energy: torch.Tensor
    forces: torch.Tensor
    weight_gradient: torch.Tensor
    """dloss/dw, a second derivative of the energy."""
    hessian_vector: torch.Tensor
    """d2E/dr2 times ``direction``."""

    def all(self) -> list[torch.Tensor]:
        return [self.energy, self.forces, self.weight_gradient, self.hessian_vector]


NAMES = ("energy", "forces", "gradient of the force loss for the weights", "Hessian times a vector")


def step(product: Product, weights: Weights, batch: Batch, hessian: bool = True) -> Derivatives:
    """One step of force training; with ``hessian`` also the second derivative in the positions."""
    positions = batch.positions.detach().requires_grad_()
    w = weights.w.detach().requires_grad_()
    y = product(features(positions, batch, w.shape[1]), w, batch)
    energy = (torch.tanh(y) * weights.v).sum()
    (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
    forces = -gradient
    loss = (forces - weights.target)[batch.real].square().mean()
    (by_weights,) = torch.autograd.grad(loss, w, retain_graph=hessian)
    by_positions = torch.zeros_like(positions)
    if hessian:
        (by_positions,) = torch.autograd.grad((gradient * weights.direction).sum(), positions)
    return Derivatives(energy.detach(), forces.detach(), by_weights, by_positions)


def run(config: Config, product: Product = grouped_product) -> Part:
    """All derivatives of both forms, their differences, time and memory."""
    batch = load(config)
    weights = make_weights(config, batch)
    part = Part("energy of molecules, one linear map per element, float64", "the one-hot einsum")
    counts = [f"{s} {n}" for s, n in zip(batch.symbols, batch.order.group_sizes.tolist(), strict=True)]
    shape = list(weights.w.shape)
    part.facts["molecules"] = f"{batch.positions.shape[0]}, {batch.atoms} atoms: {', '.join(counts)}"
    part.facts["product"] = f"x[{batch.atoms}, {config.channels}, 16] w{shape}"
    part.facts["implementation"] = told(config, weights, batch)
    got, expected = (step(which, weights, batch).all() for which in (product, one_hot_product))
    for name, a, b in zip(NAMES, got, expected, strict=True):
        part.agree(name, [a], [b], TOLERANCE)
    with torch.no_grad():
        x = features(batch.positions, batch, config.channels)

    def forward(which: Product) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return which(x, weights.w, batch)

        return call

    def training(which: Product) -> Callable[[], object]:
        return lambda: step(which, weights, batch, hessian=False)

    for what, make in (("product", forward), ("force training step", training)):
        part.costs.append(cost(what, make(product), make(one_hot_product), config.repeats))
    return part


def told(config: Config, weights: Weights, batch: Batch) -> str:
    x = torch.zeros(batch.atoms, config.channels, 16, dtype=torch.float64)
    found = multigemm.explain(x, weights.w, batch.order.group_sizes)
    return f"{found.implementation}: {found.kernel}"
