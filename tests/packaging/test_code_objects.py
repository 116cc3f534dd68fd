"""ci/code_objects.py finds what it is there for: code for an AMD GPU that is missing, or is for another."""

from __future__ import annotations

import struct
from types import ModuleType

import pytest
from loading_kit import ci_script

pytest.importorskip("elftools", reason="the check reads libraries with pyelftools")


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return ci_script("code_objects")


def elf(machine: int, kernels: tuple[str, ...] = ("rows",), local: int = 0) -> bytes:
    """An ELF file for AMD that has nothing but descriptors of kernels and a table of symbols."""
    names = b"\0" + b"".join(f"{name}.kd\0".encode() for name in kernels)
    symbols, at = bytes(24), 1
    descriptors = b"".join(struct.pack("<II", 4096, local).ljust(64, b"\0") for _ in kernels)
    for i, name in enumerate(kernels):
        symbols += struct.pack("<IBBHQQ", at, 0x11, 0, 4, 0x1000 + 64 * i, 64)
        at += len(name) + 4
    sections = b"\0.symtab\0.strtab\0.rodata\0"
    start, table, body = 64, [struct.pack("<IIQQQQIIQQ", *[0] * 10)], b""
    for name, kind, address, data, link, entry in (
        (1, 2, 0, symbols, 2, 24),
        (9, 3, 0, names, 0, 0),
        (9, 3, 0, sections, 0, 0),
        (17, 1, 0x1000, descriptors, 0, 0),
    ):
        offset = start + len(body)
        table.append(struct.pack("<IIQQQQIIQQ", name, kind, 0, address, offset, len(data), link, 1, 1, entry))
        body += data
    header = b"\x7fELF\x02\x01\x01\x40\x03" + bytes(7)
    numbers = (3, 224, 1, 0, 0, start + len(body), machine, 64, 0, 0, 64, len(table), 3)
    return header + struct.pack("<HHIQQQIHHHHHH", *numbers) + body + b"".join(table)


def bundle(entries: dict[str, bytes]) -> bytes:
    """What clang's bundler writes."""
    targets = {"host-x86_64-unknown-linux--": b""} | {
        f"hipv4-amdgcn-amd-amdhsa--{name}": code for name, code in entries.items()
    }
    head = 32 + sum(24 + len(target) for target in targets)
    table, codes = b"", b""
    for target, code in targets.items():
        table += struct.pack("<QQQ", head + len(codes), len(code), len(target)) + target.encode()
        codes += code
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(targets)) + table + codes


BOTH = ("gfx90a", "gfx942")
GOOD = {"gfx90a": elf(0x3F), "gfx942": elf(0x4C)}


def test_a_good_bundle_has_no_finding(checker: ModuleType) -> None:
    code = list(checker.bundles(b"padding" + bundle(GOOD)))
    assert [name for name, _ in code] == list(BOTH)
    assert list(checker.findings(code, BOTH)) == []


@pytest.mark.parametrize(
    ("entries", "architectures", "text"),
    [
        ({"gfx90a": elf(0x3F)}, BOTH, "has no code for gfx942"),
        (GOOD, ("gfx90a",), "has code for gfx942, which backend.json does not name"),
        ({"gfx90a": elf(0x3F), "gfx942": elf(0x3F)}, BOTH, "the code for gfx942 is for the machine 0x3f"),
        (
            {"gfx90a": elf(0x3F, ("rows", "wgrad")), "gfx942": elf(0x4C)},
            BOTH,
            "gfx942: lacks the kernel wgrad",
        ),
        ({"gfx90a": elf(0x3F, ()), "gfx942": elf(0x4C, ())}, BOTH, "has no kernel at all"),
        (GOOD | {"gfx90a": elf(0x3F, local=44)}, BOTH, "gfx90a: rows keeps 44 bytes in local memory"),
    ],
)
def test_a_finding(
    checker: ModuleType, entries: dict[str, bytes], architectures: tuple[str, ...], text: str
) -> None:
    found = list(checker.findings(list(checker.bundles(bundle(entries))), architectures))
    assert len(found) == 1 and text in found[0]


def test_a_library_without_code_for_amd_lacks_all(checker: ModuleType) -> None:
    assert len(list(checker.findings([], BOTH))) == 3
