"""Check the machine code for AMD GPUs in wheels, without a GPU: `python ci/code_objects.py WHEEL...`.

A line for each finding; exit status 1 if there is any. clang puts one ELF file for each architecture into a
bundle, in a section of the library; every one has to be for what it is said to be, and to have all kernels,
whose values have to stay in registers. Kernels for matrix cores have to use the instruction of their dtype.
"""

from __future__ import annotations

import io
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from wheel_code import core, parser, report

SECTION, MAGIC = ".hip_fatbin", b"__CLANG_OFFLOAD_BUNDLE__"
# The machine number in the flags of an ELF file for AMD: LLVM's "User Guide for AMDGPU Backend".
MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx1100": 0x41, "gfx1201": 0x4E}
AMDGPU = 224  # e_machine
SHARED_MOST = 64 * 1024  # of a block, on gfx90a and gfx942

# Matrix instructions by their number in the encoding VOP3P-MAI: AMD's ISA guides "CDNA2" and "CDNA3". Kernels
# for matrix cores have the C++ name of their dtype in their own.
MATRIX = {
    "gfx90a": {"8Bfloat16": 0x67, "7Float16": 0x4D, "7Float32": 0x45, "4Tf32": 0x45, "6Double": 0x6E},
    "gfx942": {"8Bfloat16": 0x61, "7Float16": 0x4D, "7Float32": 0x45, "4Tf32": 0x3E, "6Double": 0x6E},
}
MATRIX_KERNELS = ("rows_mfma", "wgrad_mfma")


def bundles(section: bytes) -> Iterator[tuple[str, bytes]]:
    """The architectures and ELF files of every bundle in a section; what is for the host is left out."""
    for found in re.finditer(re.escape(MAGIC), section):
        start = found.start()
        at = start + len(MAGIC)
        (count,) = struct.unpack_from("<Q", section, at)
        at += 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", section, at)
            at += 24
            target = section[at : at + length].decode()
            at += length
            if not target.startswith("host-"):
                yield target.rpartition("-")[2], section[start + offset : start + offset + size]


def read(library: Path) -> list[tuple[str, bytes]]:
    """The machine code of a library, by architecture."""
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(SECTION)
        return list(bundles(section.data())) if section else []


@dataclass(frozen=True)
class Kernel:
    """Bytes of shared memory and of local memory, which is not on the chip; the machine code."""

    shared: int
    local: int
    code: bytes


def kernels(code: bytes) -> tuple[int, dict[str, Kernel]]:
    """The machine number of an ELF file for AMD, else 0; its kernels by name."""
    elf = ELFFile(io.BytesIO(code))
    if elf.header["e_machine"] not in (AMDGPU, "EM_AMDGPU"):
        return 0, {}
    found: dict[str, bytes] = {}
    for table in elf.iter_sections():
        for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
            if isinstance(symbol["st_shndx"], int) and symbol["st_size"]:
                section = elf.get_section(symbol["st_shndx"])
                at = symbol["st_value"] - section["sh_addr"]
                found[symbol.name] = section.data()[at : at + symbol["st_size"]]
    described = {}
    for name, data in found.items():
        if name.endswith(".kd"):  # the descriptor that a launch reads
            shared, local = struct.unpack_from("<II", data)
            own = name.removesuffix(".kd")
            described[own] = Kernel(shared, local, found.get(own, b""))
    return elf.header["e_flags"] & 0xFF, described


def matrix_instructions(code: bytes) -> Counter[int]:
    """How often each matrix instruction stands in machine code, by its number."""
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    numbers = Counter(word >> 16 & 0x7F for word in words if word >> 23 == 0b110100111)
    # Below are vector instructions of the same encoding; the two others move accumulators.
    return Counter({n: count for n, count in numbers.items() if n >= 0x3E and n not in (0x58, 0x59)})


def matrix_findings(name: str, found: Mapping[str, Kernel]) -> Iterator[str]:
    """What is wrong with the kernels for matrix cores of an architecture that has them."""
    for operator in MATRIX_KERNELS:
        for dtype, number in MATRIX.get(name, {}).items():
            of_dtype = {kernel: k for kernel, k in found.items() if operator in kernel and dtype in kernel}
            if not of_dtype:
                yield f"{name}: has no {operator} of {dtype[1:]}"
            for kernel, k in sorted(of_dtype.items()):
                used = matrix_instructions(k.code)
                if not used[number]:
                    yield f"{name}: {kernel} lacks the matrix instruction {number:#x}"
                for other in sorted(set(used) - {number}):
                    yield f"{name}: {kernel} has the matrix instruction {other:#x} of another dtype"


def findings(code: Sequence[tuple[str, bytes]], architectures: Sequence[str]) -> Iterator[str]:
    """What is wrong with this machine code, given what backend.json says it is for."""
    present = {name for name, _ in code}
    for name in sorted(set(architectures) - present):
        yield f"has no code for {name}, which backend.json names"
    for name in sorted(present - set(architectures)):
        yield f"has code for {name}, which backend.json does not name"
    all_kernels: dict[str, dict[str, Kernel]] = {}
    strange = set()
    for name, data in code:  # of an architecture, one for each source
        machine, found = kernels(data)
        if machine != MACHINES.get(name):
            strange.add(name)
            yield f"the code for {name} is for the machine {machine:#x}"
        for kernel, k in sorted(found.items()):
            if k.local:
                yield f"{name}: {kernel} keeps {k.local} bytes in local memory, which is not on the chip"
            if k.shared > SHARED_MOST:
                yield f"{name}: {kernel} wants {k.shared} bytes of shared memory"
        all_kernels.setdefault(name, {}).update(found)
    every = {kernel for found in all_kernels.values() for kernel in found}
    if not every:
        yield "has no kernel at all"
    for name, found in sorted(all_kernels.items()):
        for kernel in sorted(every - set(found)):
            yield f"{name}: lacks the kernel {kernel}"
        if every and name not in strange:
            yield from matrix_findings(name, found)


def check_wheel(path: Path) -> Iterator[str]:
    """Every finding about one wheel; a wheel that is not for AMD has none."""
    with core(path, "rocm") as found:
        if found is not None:
            info, library = found
            yield from findings(read(library), info["architectures"])


def main(arguments: list[str] | None = None) -> int:
    return report(parser(__doc__).parse_args(arguments).wheels, check_wheel)


if __name__ == "__main__":
    sys.exit(main())
