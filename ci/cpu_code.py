"""Check the machine code of CPU wheels: `python ci/cpu_code.py WHEEL...`.

A line for each finding; exit status 1 if there is any. A level of x86-64 that backend.json names has to be in
the library as the instructions that it is there for, and no level that it does not name.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from wheel_code import core, parser, report

# What products are made of at each level: fused multiply-adds on vectors of its width.
TELLING = {
    "x86-64": re.compile(r"\bmulp[sd]\b.*%xmm"),
    "x86-64-v3": re.compile(r"\bvfmadd\d+p[sd]\b.*%ymm"),
    "x86-64-v4": re.compile(r"\bvfmadd\d+p[sd]\b.*%zmm"),
}


def disassemble(library: Path) -> str:
    """The instructions of a library, as binutils print them."""
    program = shutil.which("objdump")
    if program is None:
        raise SystemExit("objdump was not found: it is part of binutils, which come with every compiler")
    command = [program, "--disassemble", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def findings(code: str, architectures: Sequence[str]) -> Iterator[str]:
    """What is wrong with this code, given the levels that backend.json names."""
    for name in sorted(set(architectures) - set(TELLING)):
        yield f"nothing is known of {name}, which backend.json names"
    for name, pattern in TELLING.items():
        there = pattern.search(code) is not None
        if there and name not in architectures:
            yield f"has code for {name}, which backend.json does not name"
        if name in architectures and not there:
            yield f"has no code for {name}, which backend.json names"


def check_wheel(path: Path) -> Iterator[str]:
    """Every finding about one wheel; a wheel that is not for the CPU has none."""
    with core(path, "cpu") as found:
        if found is not None:
            info, library = found
            yield from findings(disassemble(library), info["architectures"])


def main(arguments: list[str] | None = None) -> int:
    return report(parser(__doc__).parse_args(arguments).wheels, check_wheel)


if __name__ == "__main__":
    sys.exit(main())
