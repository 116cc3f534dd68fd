"""cuEquivariance's O(3) with e3nn's order and signs of components, as MACE has it for its reduced basis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import cuequivariance as cue

from ._clebsch_gordan import wigner_3j


class E3NNGroup(cue.O3):  # type: ignore[misc]  # cuequivariance may be absent when types are checked
    def __mul__(self, other: Any) -> list[E3NNGroup]:
        return [E3NNGroup(l=ir.l, p=ir.p) for ir in cue.O3.__mul__(self, other)]

    def __lt__(self, other: Any) -> bool:
        other = self._from(other)
        return bool((self.l, self.p) < (other.l, other.p))

    @classmethod
    def clebsch_gordan(cls, rep1: Any, rep2: Any, rep3: Any) -> Any:
        """[0 or 1, 2 l1+1, 2 l2+1, 2 l3+1], normalised by component."""
        a, b, c = (cls._from(rep) for rep in (rep1, rep2, rep3))
        w = wigner_3j(a.l, b.l, c.l).mul(c.dim**0.5).unsqueeze(0)
        return (w if a.p * b.p == c.p else w[:0]).numpy()

    @classmethod
    def iterator(cls) -> Iterator[E3NNGroup]:
        for degree in itertools.count():
            yield E3NNGroup(l=degree, p=(-1) ** degree)
            yield E3NNGroup(l=degree, p=-((-1) ** degree))
