"""Check the machine code of GPU wheels without a GPU: `python ci/machine_code.py WHEEL...`.

A line for each finding; exit status 1 if there is any. A kernel that compiles and gives right values may
still have lost what it was written for: tensor cores, the copy engine, registers. That shows in its
instructions, which cuobjdump prints. `--list` prints what was found in each kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from wheel_code import core, parser, report


@dataclass(frozen=True)
class Rule:
    """What kernels of a name must have, for one architecture or (``""``) for every one."""

    why: str
    name: str  # a pattern, searched in the demangled name
    architecture: str
    opcodes: tuple[str, ...]


RULES = (
    Rule("tensor cores of a warp group", r"sm90", "sm_90a", ("HGMMA",)),
    Rule("the copy engine", r"sm90", "sm_90a", ("UTMALDG",)),
    # Of sm_80 the tiles: matrices too small for tensor cores have kernels of their own.
    Rule("tensor cores in float64", r"tile_sm80<.*Tiling<double", "", ("DMMA",)),
    Rule("tensor cores in TF32", r"tile_sm80<.*Tiling<float, ?true", "", ("HMMA",)),
    Rule("tensor cores in half precision", r"tile_sm80<.*Tiling<__(half|nv_bfloat16)", "", ("HMMA",)),
)
LOCAL = ("LDL", "STL")
# Kernels that may keep so many bytes in local memory, by a pattern of toolkit, architecture and name: where
# that was measured to be faster than fewer threads or smaller tiles, or is a compiler's doing outside loops.
SPILLS: dict[str, int] = {
    # ptxas of CUDA 12.9 keeps numbers of a tile, or of a warp's share of rows, there while it is
    # multiplied: at most one instruction in fifty reads one. CUDA 13 has registers for them.
    r"^CUDA 12\.\d+ sm_90a: .*wgrad_sm90": 32,
    r"^CUDA 12\.\d+ sm_\w+: .*rows_short_sm80<float, ?0>": 48,
    r"^CUDA 12\.\d+ sm_\w+: .*wgrad_short_sm80<double, ?false>": 32,
    # The same compiler for Blackwell, whose users CUDA 13 serves better; nothing was timed there.
    r"^CUDA 12\.\d+ sm_1[02]0: .*rows_tile_sm80<.*Tiling<float, ?true, ?64, ?64,": 72,
    r"^CUDA 12\.\d+ sm_1[02]0: .*rows_tile_sm80<.*Tiling<float, ?false, ?64, ?16,": 216,
    r"^CUDA 12\.\d+ sm_1[02]0: .*rows_tile_sm80<.*Tiling<double, ?false, ?64, ?16,": 24,
    r"^CUDA 12\.\d+ sm_120: .*rows_thin_sm80<float, ?4>": 8,
}


@dataclass
class Kernel:
    """One kernel for one architecture: how often each instruction stands in it, and what it keeps where."""

    architecture: str
    symbol: str
    name: str = ""
    opcodes: Counter[str] = field(default_factory=Counter)
    stack: int = 0
    registers: int = 0


# --- reading --------------------------------------------------------------------------------------


def parse_sass(lines: Iterable[str]) -> Iterator[Kernel]:
    """The kernels of `cuobjdump --dump-sass`."""
    architecture, kernel = "", None
    instruction = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
    for line in lines:
        if found := instruction.match(line):
            if kernel is not None:
                kernel.opcodes[found[1]] += 1
        elif found := re.match(r"\s*code for (\w+)", line):
            architecture = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            if kernel is not None:
                yield kernel
            kernel = Kernel(architecture, found[1])
    if kernel is not None:
        yield kernel


def parse_resources(lines: Iterable[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes of local memory and registers, by architecture and symbol, of `--dump-resource-usage`."""
    architecture = symbol = ""
    usage: dict[tuple[str, str], tuple[int, int]] = {}
    for line in lines:
        if found := re.match(r"arch = (\w+)", line):
            architecture = found[1]
        elif found := re.match(r"\s*Function (\S+):", line):
            symbol = found[1]
        elif found := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            usage[architecture, symbol] = int(found[2]) + int(found[3]), int(found[1])
    return usage


def tool() -> str | None:
    """cuobjdump, from PATH or from NVIDIA's wheel for Python (which brings no entry on PATH)."""
    places = [os.environ.get("PATH", ""), *(str(Path(p) / "nvidia" / "cu13" / "bin") for p in sys.path if p)]
    return shutil.which("cuobjdump", path=os.pathsep.join(places))


def demangle(symbols: Sequence[str]) -> list[str]:
    """The names as C++ has them, or as they are without c++filt (which comes with every compiler)."""
    if not symbols or not shutil.which("c++filt"):
        return list(symbols)
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def read(library: Path) -> tuple[list[Kernel], set[str]]:
    """Every kernel of a library (or of an object), and the architectures that it has PTX for."""
    program = tool()
    if program is None:
        raise SystemExit(
            "cuobjdump was not found: python -m pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    # cuobjdump runs nvdisasm, which lies beside it.
    path = f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}

    def output(option: str) -> list[str]:
        command = [program, option, str(library)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or "fatal" in done.stderr:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout.splitlines()

    kernels = list(parse_sass(output("--dump-sass")))
    usage = parse_resources(output("--dump-resource-usage"))
    for kernel, name in zip(kernels, demangle([k.symbol for k in kernels]), strict=True):
        kernel.name = name
        kernel.stack, kernel.registers = usage.get((kernel.architecture, kernel.symbol), (0, 0))
    files = re.findall(r"\.sm_(\w+)\.ptx$", "\n".join(output("--list-ptx")), re.MULTILINE)
    return kernels, {f"compute_{number}" for number in files}


# --- checking -------------------------------------------------------------------------------------


def findings(
    kernels: Sequence[Kernel], ptx: set[str], architectures: Sequence[str], toolkit: str = ""
) -> Iterator[str]:
    """What is wrong with these kernels, given what backend.json says they are compiled for, and by what."""
    promised, present = set(architectures), ptx | {kernel.architecture for kernel in kernels}
    for name in sorted(promised - present):
        yield f"has no code for {name}, which backend.json names"
    for name in sorted(present - promised):
        yield f"has code for {name}, which backend.json does not name"
    for kernel in kernels:
        where = f"{kernel.architecture}: {kernel.name or kernel.symbol}"
        local = sum(kernel.opcodes[opcode] for opcode in LOCAL)
        known = f"CUDA {toolkit} {where}"
        allowed = max((size for name, size in SPILLS.items() if re.search(name, known)), default=0)
        if kernel.stack > allowed or (local and not allowed):
            yield f"{where}: keeps {kernel.stack} bytes in local memory, {local} instructions on it"
        # Several that overlap share an arrival and a wait; else the compiler puts both around each.
        if 0 < 2 * kernel.opcodes["HGMMA"] <= kernel.opcodes["WARPGROUP"]:
            yield f"{where}: waits for each HGMMA before the next"
    for rule in RULES:
        if rule.architecture and rule.architecture not in promised:
            continue
        meant = [
            k
            for k in kernels
            if rule.architecture in ("", k.architecture) and re.search(rule.name, k.name or k.symbol)
        ]
        if not meant:
            yield f"has no kernel {rule.name!r}, so nothing was checked for {rule.why}"
        for kernel in meant:
            for opcode in rule.opcodes:
                if not kernel.opcodes[opcode]:
                    yield f"{kernel.architecture}: {kernel.name}: no {opcode}, so it does not use {rule.why}"


def check_wheel(path: Path, show: bool = False) -> Iterator[str]:
    """Every finding about one wheel; a wheel without device code has none."""
    with core(path, "cuda") as found:
        if found is None:
            return
        info, library = found
        kernels, ptx = read(library)
    for kernel in kernels if show else ():
        told = {o: n for o, n in kernel.opcodes.items() if o in {"HGMMA", "UTMALDG", "DMMA", "HMMA", *LOCAL}}
        print(f"{kernel.architecture} {kernel.registers:3} registers {told} {kernel.name}")
    yield from findings(kernels, ptx, info["architectures"], info["toolkit"])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--list", action="store_true", help="print each kernel's telling instructions too")
    given = options.parse_args()
    return report(given.wheels, partial(check_wheel, show=given.list))


if __name__ == "__main__":
    sys.exit(main())
