"""Irreducible representations of O(3), read from text: "128x0e + 128x1o".

The names, the order and the memory layouts are those of e3nn. e3nn's and cuEquivariance's own objects are
read through their text, so neither is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._errors import OptionError

LAYOUTS = ("mul_ir", "ir_mul")
_PART = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*([eo])")


class Irrep(NamedTuple):
    """Degree l and parity p, 1 or -1. Sorted as e3nn sorts: by l, odd before even."""

    l: int  # noqa: E741
    p: int

    @property
    def dim(self) -> int:
        return 2 * self.l + 1

    def __str__(self) -> str:
        return f"{self.l}{'e' if self.p == 1 else 'o'}"

    def times(self, other: Irrep) -> Iterator[Irrep]:
        """The irreps of the tensor product, by degree."""
        for degree in range(abs(self.l - other.l), self.l + other.l + 1):
            yield Irrep(degree, self.p * other.p)


class Block(NamedTuple):
    """``mul`` copies of an irrep; mul * ir.dim columns."""

    mul: int
    ir: Irrep

    @property
    def dim(self) -> int:
        return self.mul * self.ir.dim

    def __str__(self) -> str:
        return f"{self.mul}x{self.ir}"


class Irreps(tuple[Block, ...]):
    """A direct sum of irreps, as blocks of columns in the order given.

    In the layout "mul_ir" a block's columns are [mul, 2l+1], in "ir_mul" [2l+1, mul].
    """

    __slots__ = ()

    def __new__(cls, irreps: Any) -> Irreps:
        """From text, or from anything whose ``str()`` is such text. Raises ``OptionError``."""
        if isinstance(irreps, Irreps):
            return irreps
        blocks = []
        text = str(irreps).strip()
        for part in text.split("+") if text else []:
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise OptionError(
                    f'irreps must read like "8x0e + 8x1o" (copies x degree, e or o), got {text!r}: '
                    f"{part.strip()!r} is no part of that."
                )
            mul, degree, parity = match.groups()
            blocks.append(Block(int(mul or 1), Irrep(int(degree), 1 if parity == "e" else -1)))
        return tuple.__new__(cls, blocks)

    def __getnewargs__(self) -> tuple[str]:  # for copies and pickles
        return (str(self),)

    def __str__(self) -> str:
        return "+".join(map(str, self))

    def __repr__(self) -> str:
        return f"Irreps({str(self)!r})"

    @property
    def dim(self) -> int:
        return sum(block.dim for block in self)

    def starts(self) -> list[int]:
        """The first column of each block."""
        result, at = [], 0
        for block in self:
            result.append(at)
            at += block.dim
        return result


def layout(name: Any) -> str:
    """``name`` as one of `LAYOUTS`; cuEquivariance's constants are read through their text."""
    text = str(name).strip("()").split(".")[-1]
    text = {"irreps_mul": "ir_mul", "mul,irrep": "mul_ir", "irrep,mul": "ir_mul"}.get(text, text)
    if text not in LAYOUTS:
        raise OptionError(f'layout must be "mul_ir" or "ir_mul", got {name!r}.')
    return text
