"""What the audits read in a shared library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.hash import GNUHashSection
from elftools.elf.sections import SymbolTableSection

# Sources that a compiler names in error texts; an absolute one names a folder of the machine that built it.
SOURCE = re.compile(rb"(?<![\w.\-/])(/[\w.+\-]+(?:/[\w.+\-]+)+\.(?:cpp|cc|cxx|c|cuh|cu|hpp|h|inl|hip))\0")
# Of NVIDIA's static runtime, compiled by NVIDIA.
FOREIGN = re.compile(r"^/dvs/")


class Library:
    """The dynamic section, the symbols and the texts of one ELF file."""

    def __init__(self, path: Path) -> None:
        self.needed: list[str] = []
        self.rpath: list[str] = []
        self.runpath: list[str] = []
        self.defined: set[str] = set()
        self.undefined: set[str] = set()
        self.versions: dict[str, set[str]] = {}  # by library: GLIBC_2.14, GLIBCXX_3.4.21 ...
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.machine = elf["e_machine"]
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    self._read_dynamic(section)
                elif isinstance(section, GNUVerNeedSection):
                    for library, versions in section.iter_versions():
                        self.versions.setdefault(library.name, set()).update(v.name for v in versions)
                elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                    for symbol in section.iter_symbols():
                        if symbol.name and symbol["st_info"]["bind"] != "STB_LOCAL":
                            missing = symbol["st_shndx"] == "SHN_UNDEF"
                            (self.undefined if missing else self.defined).add(symbol.name)
        names = {found.decode() for found in SOURCE.findall(path.read_bytes())}
        self.sources = {name for name in names if not FOREIGN.match(name)}

    def _read_dynamic(self, section: DynamicSection) -> None:
        for tag in section.iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                self.needed.append(tag.needed)
            elif tag.entry.d_tag == "DT_RPATH":
                self.rpath += tag.rpath.split(":")
            elif tag.entry.d_tag == "DT_RUNPATH":
                self.runpath += tag.runpath.split(":")


def newer(versions: Iterable[str], floors: Mapping[str, str]) -> list[str]:
    """Those symbol versions, as GLIBC_2.34, that are newer than the floor of their kind (GLIBC: 2.28)."""
    found = []
    for version in versions:
        kind, _, number = version.rpartition("_")
        if kind in floors and re.fullmatch(r"[\d.]+", number) and _numbers(number) > _numbers(floors[kind]):
            found.append(version)
    return sorted(found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def lacking(path: Path, symbols: Iterable[str]) -> list[str]:
    """Those symbols that a library does not define, by its hash table: torch's symbols are very many."""
    with path.open("rb") as file:
        tables = [s for s in ELFFile(file).iter_sections() if isinstance(s, GNUHashSection)]
        if not tables:
            return list(symbols)
        return [symbol for symbol in symbols if tables[0].get_symbol(symbol) is None]
