"""Write contractions' terms as C++ tables, which kernels are unrolled over: `python ci/terms.py [--check]`.

Of MACE's contractions of 0e + 1o + 2e + 3o at correlation 3, for each output irrep. The tables are those of
``multigemm.equivariant``, which calls the kernels with a fingerprint of them: other tables are left
to the kernels that read them. Needs PyTorch and this project's front.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from multigemm.equivariant._terms import Setting, Shared, fingerprint, shared, terms

PATH = Path(__file__).parents[1] / "shared/kernels/indexed_polynomial/unrolled_terms.h"
IRREPS_IN, OUTPUTS, CORRELATION = "1x0e+1x1o+1x2e+1x3o", ("1x0e", "1x1o", "1x2e"), 3
_HEAD = """\
// The terms of symmetric contractions of 0e + 1o + 2e + 3o, correlation 3, for each output irrep.
// Made by ci/terms.py from the Clebsch-Gordan coefficients of multigemm.equivariant: edit that, not this.
#pragma once

#include <stdint.h>

// clang-format off
namespace multigemm {
namespace polynomial_unrolled {

// kTerms: p, d, i, j, k, and the number of the factor, in 5, 4, 5, 5, 5 and 8 bits; sorted.
// kGroups: where those of one weight and component begin, and the end.
"""
_TAIL = """\
}  // namespace polynomial_unrolled
}  // namespace multigemm
"""


def setting(outputs: tuple[str, ...]) -> Setting:
    return Setting(IRREPS_IN, outputs, (CORRELATION,) * len(outputs), False)


def _lines(values: list[str]) -> Iterator[str]:
    line = "     "
    for value in values:
        if len(line) + len(value) + 2 > 120:
            yield line
            line = "     "
        line += f" {value},"
    yield line


def _struct(name: str, components: int, few: Shared) -> Iterator[str]:
    factors = sorted({round(float(f), 12): float(f) for f in few.factors}.items())
    number = {key: at for at, (key, _) in enumerate(factors)}
    ends = few.entry_ends.tolist()
    codes = []
    for row, (d, i, j, k, t) in enumerate(few.entries.tolist()):
        p = sum(end <= row for end in ends)
        f = number[round(float(few.factors[t]), 12)]
        code = 0
        for value, bits in ((p, 5), (d, 4), (i, 5), (j, 5), (k, 5), (f, 8)):
            assert value < 1 << bits, name
            code = code << bits | value
        codes.append(code)
    assert len({code >> 8 for code in codes}) == len(codes), name
    begins = [at for at, code in enumerate(codes) if at == 0 or code >> 23 != codes[at - 1] >> 23]
    groups = [str(at) for at in (*begins, len(codes))]
    yield f"struct {name} {{"
    yield f"  static constexpr int kCount = {len(codes)}, kWeights = {len(ends)}, kComponents = {components};"
    yield f"  static constexpr uint32_t kTerms[{len(codes)}] = {{"
    yield from _lines([f"0x{code:08x}" for code in codes])
    yield "  };"
    yield f"  static constexpr int kGroupCount = {len(begins)};"
    yield f"  static constexpr int kGroups[{len(groups)}] = {{"
    yield from _lines(groups)
    yield "  };"
    yield f"  static constexpr double kFactors[{len(factors)}] = {{"
    yield from _lines([repr(value) for _, value in factors])
    yield "  };"
    yield "};"
    yield ""


def text() -> str:
    lines = []
    names = [f"Terms{output[2:]}" for output in OUTPUTS]
    for name, output in zip(names, OUTPUTS, strict=True):
        one = setting((output,))
        lines += _struct(name, terms(one).components, shared(one))
    lines.append("// Of each set of these outputs, in their order: bit 0 is the first one.")
    lines.append("struct Known {\n  int64_t fingerprint;\n  int outputs;\n};")
    lines.append("constexpr Known kKnown[] = {")
    for mask in range(1, 1 << len(OUTPUTS)):
        chosen = tuple(itertools.compress(OUTPUTS, (mask >> bit & 1 for bit in range(len(OUTPUTS)))))
        lines.append(f"    {{{fingerprint(setting(chosen))}, {mask}}},")
    lines += ["};", ""]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def main() -> int:
    made = text()
    if "--check" not in sys.argv[1:]:
        PATH.write_text(made)
    elif not PATH.exists() or PATH.read_text() != made:
        print(f"{PATH.name} is stale: python ci/terms.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
