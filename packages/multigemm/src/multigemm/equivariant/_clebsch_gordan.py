"""Coupling coefficients of real spherical harmonics, and the symmetric couplings of many copies of one input.

Sign, order of components and norm are e3nn's, so that parameters mean the same numbers there and here.
"""

from __future__ import annotations

import functools
import math

import torch

from .._errors import OptionError
from ._irreps import Irrep, Irreps


def _su2(j1: int, j2: int, j3: int, m1: int, m2: int) -> float:
    """<j1 m1 j2 m2 | j3 m1+m2> by Racah's formula (Varshalovich et al., Quantum Theory of Angular Momentum,
    8.2.1), with integers of any size and one rounding at the end."""
    m3 = m1 + m2
    if abs(m3) > j3:
        return 0.0
    f = math.factorial
    low = max(0, j2 - j3 - m1, j1 - j3 + m2)
    high = min(j1 + j2 - j3, j1 - m1, j2 + m2)
    # The sum's terms over one denominator: exact integers.
    common = math.prod(
        f(n) for n in (high, j1 + j2 - j3, j1 - m1, j2 + m2, j3 - j2 + m1 + high, j3 - j1 - m2 + high)
    )
    total = 0
    for k in range(low, high + 1):
        term = math.prod(
            f(n) for n in (k, j1 + j2 - j3 - k, j1 - m1 - k, j2 + m2 - k, j3 - j2 + m1 + k, j3 - j1 - m2 + k)
        )
        total += (-1) ** k * (common // term)
    if total == 0:
        return 0.0
    over = (2 * j3 + 1) * f(j3 + j1 - j2) * f(j3 - j1 + j2) * f(j1 + j2 - j3)
    over *= f(j3 + m3) * f(j3 - m3) * f(j1 - m1) * f(j1 + m1) * f(j2 - m2) * f(j2 + m2)
    # Python divides integers of any size with one rounding.
    squared = over * total * total / (f(j1 + j2 + j3 + 1) * common * common)
    return math.copysign(math.sqrt(squared), total)


def _to_complex(degree: int) -> torch.Tensor:
    """[2l+1, 2l+1] complex128: from real components, m = -l .. l (sines first), to complex ones."""
    width, root = 2 * degree + 1, 1 / math.sqrt(2)
    q = [[0j] * width for _ in range(width)]
    q[degree][degree] = 1
    for m in range(1, degree + 1):
        sign = (-1) ** m
        q[degree - m][degree + m], q[degree - m][degree - m] = root, -1j * root
        q[degree + m][degree + m], q[degree + m][degree - m] = sign * root, 1j * sign * root
    return torch.tensor(q, dtype=torch.complex128) * (-1j) ** degree


@functools.cache
def wigner_3j(l1: int, l2: int, l3: int) -> torch.Tensor:
    """[2 l1+1, 2 l2+1, 2 l3+1] float64: the one invariant of three degrees, of norm 1. Do not write into it.

    The sign is that of e3nn 0.4, which MACE requires: for ascending degrees the middle entry is positive, or
    where it is zero the first that is not; an odd permutation of the degrees brings (-1)^(l1 + l2 + l3).
    """
    degrees = (l1, l2, l3)
    order = sorted(range(3), key=lambda i: degrees[i])
    if order != [0, 1, 2]:
        w = wigner_3j(*(degrees[i] for i in order)).permute([order.index(i) for i in range(3)])
        odd = order in ([0, 2, 1], [1, 0, 2], [2, 1, 0])
        return w * (-1) ** sum(degrees) if odd else w
    complex_ = torch.zeros(2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1, dtype=torch.complex128)
    for m1 in range(-l1, l1 + 1):
        for m2 in range(-l2, l2 + 1):
            if abs(m1 + m2) <= l3:
                complex_[l1 + m1, l2 + m2, l3 + m1 + m2] = _su2(l1, l2, l3, m1, m2)
    q1, q2, q3 = (_to_complex(degree) for degree in degrees)
    real = torch.einsum("ij,kl,nm,ikn->jlm", q1, q2, q3.conj(), complex_).real
    real = torch.where(real.abs() < 1e-14, 0.0, real / real.norm())
    middle = real[l1, l2, l3]
    sign = middle if middle != 0 else real[real != 0][0]
    return real * sign.sign()


def _couple(left: torch.Tensor, ir_left: Irrep, ir: Irrep, out: Irrep) -> torch.Tensor:
    """left [2 l_left+1, d^n] -> [2 l_out+1, d^n, 2l+1], normalised by component."""
    w = wigner_3j(out.l, ir_left.l, ir.l) * math.sqrt(out.dim)
    return torch.einsum("jk,ijl->ikl", left, w)


@functools.lru_cache(maxsize=64)
def coupling_basis(irreps_in: str, ir_out: str, correlation: int) -> torch.Tensor:
    """All ways to couple ``correlation`` copies of the input to one irrep: MACE's ``U_matrix_real``.

    ``irreps_in`` has width d. Returns [2L+1, d, .., d, P] float64 with P paths, in MACE's order (paths of
    equal irrep keep the order of the recursion); P = 1 and zeros where there is no path. The formula is
    MACE's, arXiv:2206.07697, equation 10.
    """
    irreps, target = Irreps(irreps_in), Irreps(ir_out)[0].ir
    width = irreps.dim
    entries: list[tuple[Irrep, torch.Tensor]] = []
    eye = torch.eye(width, dtype=torch.float64)
    at = 0
    singles = []
    for mul, ir in irreps:
        for _ in range(mul):
            singles.append((ir, at))
            entries.append((ir, eye[at : at + ir.dim]))
            at += ir.dim
    for nu in range(2, correlation + 1):  # the first factor is in the input's order, later ones are sorted
        following = []
        for ir_left, left in entries:
            for ir, first in singles:
                for out in ir_left.times(ir):
                    if nu == correlation and out != target:
                        continue
                    wide = torch.zeros(out.dim, width ** (nu - 1), width, dtype=torch.float64)
                    wide[:, :, first : first + ir.dim] = _couple(left, ir_left, ir, out)
                    following.append((out, wide.reshape(out.dim, -1)))
        entries = sorted(following, key=lambda entry: entry[0])
    paths = [basis for ir, basis in entries if ir == target]
    shape = (target.dim, *[width] * correlation)
    if not paths:
        return torch.zeros(*shape, 1, dtype=torch.float64)
    return torch.stack([basis.reshape(shape) for basis in paths], -1)


@functools.lru_cache(maxsize=64)
def reduced_basis(irreps_in: str, ir_out: str, correlation: int) -> torch.Tensor:
    """As ``coupling_basis``, of the independent symmetric couplings that cuEquivariance enumerates.

    Raises ``OptionError`` where cuequivariance is not installed.
    """
    try:
        import cuequivariance as cue
    except ModuleNotFoundError as error:
        raise OptionError(
            "use_reduced_cg=True takes its basis from cuequivariance, which is not installed: "
            "python -m pip install cuequivariance."
        ) from error
    from ._cue_group import E3NNGroup

    target = Irreps(ir_out)[0].ir
    shape = (target.dim, *[Irreps(irreps_in).dim] * correlation)
    try:
        found = cue.reduced_symmetric_tensor_product_basis(
            cue.Irreps(E3NNGroup, irreps_in),
            correlation,
            keep_ir=E3NNGroup(l=target.l, p=target.p),
            layout=cue.ir_mul,
        ).array
    except ValueError:  # there is no such coupling
        return torch.zeros(*shape, 1, dtype=torch.float64)
    basis = torch.as_tensor(found, dtype=torch.float64).unflatten(-1, (target.dim, -1)).movedim(-2, 0)
    return basis.contiguous() if basis.shape[-1] else torch.zeros(*shape, 1, dtype=torch.float64)
