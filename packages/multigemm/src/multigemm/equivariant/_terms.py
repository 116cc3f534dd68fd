"""The contraction as a sparse polynomial: its monomials, and how weights become their coefficients.

    y[n, d, c] = sum over terms (d, i, j, k) of  W[element(n), t, c] * x[n, i, c] * x[n, j, c] * x[n, k, c]

with i <= j <= k and one more component, number D, which is 1: so a term of degree 2 is (d, i, j, D), one of
degree 1 is (d, i, D, D). Symmetrising the couplings leaves, of 0e+1o+2e+3o, 94, 316 and 477 terms for 0e, 1o
and 2e where the dense couplings have 16^3 (2L+1). Terms are sorted, so that those that share (d, i, j), a
*pair*, and those that share (d, i), a *head*, stand together: Horner's rule runs along them.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import torch

from .._errors import OptionError
from ._clebsch_gordan import coupling_basis, reduced_basis
from ._irreps import Irreps

DEGREE = 3
"""The highest degree of a monomial."""
_ZERO = 1e-10


class Setting(NamedTuple):
    """What determines the polynomial: text, so that results can be remembered."""

    irreps_in: str
    """One copy of each block."""
    irreps_out: tuple[str, ...]
    correlation: tuple[int, ...]
    reduced: bool

    def basis(self, which: int, nu: int) -> torch.Tensor:
        """[2L+1, D, .., D, P] float64, of output ``which`` and degree ``nu``."""
        return couplings(self.irreps_in, self.irreps_out[which], nu, self.reduced)


def couplings(irreps_in: str, ir_out: str, nu: int, reduced: bool) -> torch.Tensor:
    return (reduced_basis if reduced else coupling_basis)(irreps_in, ir_out, nu)


class Terms(NamedTuple):
    """The terms, T of them, on the CPU. ``coefficients[o]`` [T_o, P_o] float64 takes the weights of output o,
    degrees falling, to the coefficients of its terms; the terms of all outputs follow each other."""

    heads: torch.Tensor
    """[H, 4] int32: d, i, and the range of pairs."""
    pairs: torch.Tensor
    """[Q, 4] int32: j, the range of terms, and d."""
    last: torch.Tensor
    """[T] int32: k."""
    coefficients: tuple[torch.Tensor, ...]
    components: int
    """O, of all outputs."""
    width: int
    """D, of the input."""

    def indices(self) -> torch.Tensor:
        """[T, 4] int64: d, i, j, k of each term."""
        heads, pairs = self.heads.long(), self.pairs.long()
        head_of_pair = torch.repeat_interleave(torch.arange(len(heads)), heads[:, 3] - heads[:, 2])
        pair_of_term = torch.repeat_interleave(torch.arange(len(pairs)), pairs[:, 2] - pairs[:, 1])
        head = heads[head_of_pair[pair_of_term]]
        return torch.stack([head[:, 0], head[:, 1], pairs[pair_of_term, 0], self.last.long()], 1)


def _polynomial(setting: Setting, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one output: [T, 4] sorted indices (d, i, j, k) and [T, P] coefficients."""
    width = Irreps(setting.irreps_in).dim
    keys, values = [], []
    columns = 0
    bases = [setting.basis(which, nu) for nu in range(setting.correlation[which], 0, -1)]
    total = sum(basis.shape[-1] for basis in bases)
    for basis in bases:
        places = basis.abs().amax(-1).nonzero()  # [E, 1 + nu]
        entries = basis[tuple(places.unbind(1))]  # [E, P]
        factors = places[:, 1:].sort(1).values
        unit = factors.new_full((len(places), DEGREE - factors.shape[1]), width)
        keys.append(torch.cat([places[:, :1], factors, unit], 1))
        wide = entries.new_zeros(len(places), total)
        wide[:, columns : columns + basis.shape[-1]] = entries
        values.append(wide)
        columns += basis.shape[-1]
    unique, inverse = torch.unique(torch.cat(keys), dim=0, return_inverse=True)
    sums = torch.zeros(len(unique), total, dtype=torch.float64).index_add_(0, inverse, torch.cat(values))
    kept = (sums.abs() > _ZERO).any(1)  # what is antisymmetric adds up to nothing
    return unique[kept], torch.where(sums.abs() > _ZERO, sums, 0.0)[kept]


@functools.lru_cache(maxsize=16)
def terms(setting: Setting) -> Terms:
    """The polynomial of all outputs. Do not write into its tensors. Raises ``OptionError``."""
    if any(not 1 <= nu <= DEGREE for nu in setting.correlation):
        raise OptionError(
            f"SymmetricContraction: correlation must be 1 to {DEGREE}, got {list(setting.correlation)}."
        )
    found = [_polynomial(setting, which) for which in range(len(setting.irreps_out))]
    dims = [Irreps(out).dim for out in setting.irreps_out]
    at = 0
    indices = [torch.zeros(0, 4, dtype=torch.int64)]
    for (keys, _), dim in zip(found, dims, strict=True):
        indices.append(keys + torch.tensor([at, 0, 0, 0]))
        at += dim
    every = torch.cat(indices)
    pair_keys, pair_sizes = torch.unique_consecutive(every[:, :3], dim=0, return_counts=True)
    head_keys, head_sizes = torch.unique_consecutive(pair_keys[:, :2], dim=0, return_counts=True)
    return Terms(
        heads=torch.cat([head_keys, _ranges(head_sizes)], 1).int(),
        pairs=torch.cat([pair_keys[:, 2:], _ranges(pair_sizes), pair_keys[:, :1]], 1).int(),
        last=every[:, 3].int(),
        coefficients=tuple(values for _, values in found),
        components=at,
        width=Irreps(setting.irreps_in).dim,
    )


class Shared(NamedTuple):
    """The same polynomial with fewer weights, the coefficients of a few independent terms: all others depend
    linearly on them. The coefficient of a term is the sum over its entries of factor times weight p, so that
    an entry is a term (d, i, j, k, p) of ``indexed_polynomial``. E entries, P weights; on the CPU."""

    pairs: torch.Tensor
    """[Q, 4] int32: j, the range of entries, and d."""
    last: torch.Tensor
    """[E, 2] int32: k and p."""
    factors: torch.Tensor
    """[E] float64."""
    entries: torch.Tensor
    """[E, 5] int32: d, i, j, k and the number of the entry, in the order of p."""
    entry_ends: torch.Tensor
    """[P] int32."""
    mixtures: tuple[torch.Tensor, ...]
    """Of each output [P_o, weights of the module] float64: what the module's weights make of it."""


@functools.lru_cache(maxsize=16)
def shared(setting: Setting) -> Shared:
    """Do not write into its tensors."""
    found = terms(setting)
    parts = [_independent(table) for table in found.coefficients]
    columns, rows = sum(m.shape[0] for _, m in parts), len(found.last)
    expansion = torch.zeros(rows, columns, dtype=torch.float64)
    row = column = 0
    for table, mixture in parts:
        row_end, column_end = row + table.shape[0], column + mixture.shape[0]
        expansion[row:row_end, column:column_end] = table
        row, column = row_end, column_end
    term, weight = expansion.nonzero(as_tuple=True)  # in the order of terms
    sizes = torch.bincount(term, minlength=rows)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    pairs = found.pairs.clone()
    pairs[:, 1:3] = ends[found.pairs[:, 1:3].long()].int()
    order = weight.argsort(stable=True)
    return Shared(
        pairs=pairs,
        last=torch.stack([found.last[term], weight.int()], 1),
        factors=expansion[term, weight],
        entries=torch.cat([found.indices()[term[order]], order.unsqueeze(1)], 1).int(),
        entry_ends=torch.bincount(weight, minlength=columns).cumsum(0).int(),
        mixtures=tuple(mixture for _, mixture in parts),
    )


@functools.lru_cache(maxsize=16)
def fingerprint(setting: Setting) -> int:
    """Of the tables: a backend has kernels of their own for those that it knows by this number."""
    found, few = terms(setting), shared(setting)
    rows = few.entries[:, :4].tolist()
    factors = [round(float(few.factors[t]) * 2**24) for t in few.entries[:, 4].tolist()]
    text = repr((found.width, found.components, few.entry_ends.tolist(), rows, factors))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_ORDERS = 24
"""Ways to choose the independent terms; the one that leaves the fewest entries is taken."""


def _independent(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, P] float64 as a product [T, R] @ [R, P], R the rank; the second factor has rows of the table.

    By Gauss and Jordan's elimination of its columns; which rows are taken is tried in several orders.
    """
    generator = torch.Generator().manual_seed(0)
    best: tuple[torch.Tensor, list[int]] | None = None
    for attempt in range(_ORDERS):
        order = torch.arange(len(table)) if attempt == 0 else torch.randperm(len(table), generator=generator)
        reduced, pivots = table.T.clone(), list[int]()
        for t in order.tolist():
            r = len(pivots)
            if r == reduced.shape[0]:
                break
            p = r + int(reduced[r:, t].abs().argmax())
            if abs(float(reduced[p, t])) < _ZERO:
                continue
            reduced[[r, p]] = reduced[[p, r]]
            reduced[r] /= reduced[r, t].clone()
            others = reduced[:, t].clone()
            others[r] = 0.0
            reduced -= others.unsqueeze(1) * reduced[r]
            pivots.append(t)
        found = torch.where(reduced.abs() > _ZERO, reduced, 0.0)[: len(pivots)].T
        if best is None or found.count_nonzero() < best[0].count_nonzero():
            best = found, pivots
    expansion, pivots = best  # type: ignore[misc]  # there is one order at least
    return expansion, table[pivots]


def _ranges(sizes: torch.Tensor) -> torch.Tensor:
    ends = sizes.cumsum(0)
    return torch.stack([ends - sizes, ends], 1)


def projection(there: Setting, here: Setting, which: int, nu: int) -> torch.Tensor:
    """[P here, P there] float64: weights of one basis that give the values that others give in another.

    Both bases symmetrised over their factors; the least-squares solution of least norm. Raises
    ``OptionError`` where ``here`` does not span what ``there`` does.
    """
    a, b = (_symmetrised(s.basis(which, nu)) for s in (here, there))
    solution: torch.Tensor = torch.linalg.pinv(a, rtol=1e-10) @ b
    if not torch.allclose(a @ solution, b, rtol=0, atol=1e-9):
        raise OptionError(
            "SymmetricContraction: the one basis does not span the other; the values would change."
        )
    return solution


def _symmetrised(basis: torch.Tensor) -> torch.Tensor:
    """[2L+1, D, .., D, P] -> [(2L+1) D^nu, P], the mean over permutations of the D's."""
    import itertools

    nu = basis.dim() - 2
    orders = list(itertools.permutations(range(1, nu + 1)))
    total = sum(basis.permute(0, *order, nu + 1) for order in orders)
    return (total / len(orders)).flatten(0, -2)  # type: ignore[union-attr]  # there is one order at least
