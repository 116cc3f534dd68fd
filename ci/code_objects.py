"""Check the machine code for AMD GPUs in wheels, without a GPU: `python ci/code_objects.py WHEEL...`.

A line for each finding; exit status 1 if there is any. clang puts one ELF file for each architecture into a
bundle, in a section of the library; every one has to be for what it is said to be, and to have all kernels,
whose values have to stay in registers.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

SECTION, MAGIC = ".hip_fatbin", b"__CLANG_OFFLOAD_BUNDLE__"
# The machine number in the flags of an ELF file for AMD: LLVM's "User Guide for AMDGPU Backend".
MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx1100": 0x41, "gfx1201": 0x4E}
AMDGPU = 224  # e_machine


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


def kernels(code: bytes) -> tuple[int, dict[str, int]]:
    """The machine number of an ELF file for AMD, else 0; of each kernel the bytes of local memory."""
    elf = ELFFile(io.BytesIO(code))
    if elf.header["e_machine"] not in (AMDGPU, "EM_AMDGPU"):
        return 0, {}
    found = {}
    for table in elf.iter_sections():
        for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
            if symbol.name.endswith(".kd"):  # the descriptor that a launch reads
                section = elf.get_section(symbol["st_shndx"])
                at = symbol["st_value"] - section["sh_addr"]
                _shared, local = struct.unpack_from("<II", section.data(), at)
                found[symbol.name.removesuffix(".kd")] = local
    return elf.header["e_flags"] & 0xFF, found


def findings(code: Sequence[tuple[str, bytes]], architectures: Sequence[str]) -> Iterator[str]:
    """What is wrong with this machine code, given what backend.json says it is for."""
    present = {name for name, _ in code}
    for name in sorted(set(architectures) - present):
        yield f"has no code for {name}, which backend.json names"
    for name in sorted(present - set(architectures)):
        yield f"has code for {name}, which backend.json does not name"
    all_kernels: dict[str, set[str]] = {}
    for name, data in code:
        machine, found = kernels(data)
        if machine != MACHINES.get(name):
            yield f"the code for {name} is for the machine {machine:#x}"
        for kernel, local in sorted(found.items()):
            if local:
                yield f"{name}: {kernel} keeps {local} bytes in local memory, which is not on the chip"
        all_kernels.setdefault(name, set()).update(found)
    every = set().union(*all_kernels.values())
    if not every:
        yield "has no kernel at all"
    for name, names in sorted(all_kernels.items()):
        for kernel in sorted(every - names):
            yield f"{name}: lacks the kernel {kernel}"


def check_wheel(path: Path) -> Iterator[str]:
    """Every finding about one wheel; a wheel that is not for AMD has none."""
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        package = path.name.split("-")[0]
        info = json.loads(wheel.read(f"{package}/backend.json"))
        if info["kind"] != "rocm":
            return
        code = read(Path(wheel.extract(f"{package}/{info['core']}", folder)))
    yield from findings(code, info["architectures"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args(arguments)
    found = [f"{path.name}: {line}" for path in options.wheels for line in check_wheel(path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
