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


DTYPES = ("8Bfloat16", "7Float16", "7Float32", "4Tf32", "6Double")
INSTRUCTIONS = {"gfx90a": (0x67, 0x4D, 0x45, 0x45, 0x6E), "gfx942": (0x61, 0x4D, 0x45, 0x3E, 0x6E)}
MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C}


def matrix(name: str, **replaced: int | None) -> dict[str, tuple[int, ...]]:
    """The kernels for matrix cores and their instruction; another is given by name, None leaves it out."""
    found = {
        f"{operator}_{dtype}": number
        for operator in ("rows", "wgrad")
        for dtype, number in zip(DTYPES, INSTRUCTIONS[name], strict=True)
    } | replaced
    names = {key: key.replace("_", "_mfma_") for key in found}
    return {names[key]: (number,) for key, number in found.items() if number is not None}


def elf(
    machine: int, kernels: dict[str, tuple[int, ...]] | None = None, local: int = 0, shared: int = 4096
) -> bytes:
    """An ELF file for AMD: descriptors and code of kernels, a table of symbols; "rows" has local memory."""
    chip = next(name for name, number in MACHINES.items() if number == machine)
    kernels = {"rows": ()} | matrix(chip) if kernels is None else kernels
    names, symbols, descriptors, text = b"\0", bytes(24), b"", b""
    for i, (name, instructions) in enumerate(kernels.items()):
        # A copy, one of a pair in the matrix instructions' encoding, these, the end.
        words = [
            0x7E000200,
            0xD3B34000,
            0x18000100,
            *(0b110100111 << 23 | n << 16 for n in instructions),
            0xBF810000,
        ]
        code = struct.pack(f"<{len(words)}I", *words)
        symbols += struct.pack("<IBBHQQ", len(names), 0x11, 0, 4, 0x1000 + 64 * i, 64)
        names += f"{name}.kd\0".encode()
        symbols += struct.pack("<IBBHQQ", len(names), 0x12, 0, 5, 0x8000 + len(text), len(code))
        names += f"{name}\0".encode()
        descriptors += struct.pack("<II", shared, local if name == "rows" else 0).ljust(64, b"\0")
        text += code
    sections = b"\0.symtab\0.strtab\0.rodata\0.text\0"
    start, table, body = 64, [struct.pack("<IIQQQQIIQQ", *[0] * 10)], b""
    for name, kind, address, data, link, entry in (
        (1, 2, 0, symbols, 2, 24),
        (9, 3, 0, names, 0, 0),
        (9, 3, 0, sections, 0, 0),
        (17, 1, 0x1000, descriptors, 0, 0),
        (25, 1, 0x8000, text, 0, 0),
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
            GOOD | {"gfx90a": elf(0x3F, {"rows": (), "wgrad": ()} | matrix("gfx90a"))},
            BOTH,
            "gfx942: lacks the kernel wgrad",
        ),
        ({"gfx90a": elf(0x3F, {}), "gfx942": elf(0x4C, {})}, BOTH, "has no kernel at all"),
        (GOOD | {"gfx90a": elf(0x3F, local=44)}, BOTH, "gfx90a: rows keeps 44 bytes in local memory"),
        (
            {"gfx90a": elf(0x3F, {"rows": (1,)} | matrix("gfx90a", rows_6Double=None))},
            ("gfx90a",),
            "gfx90a: has no rows_mfma of Double",
        ),
    ],
)
def test_a_finding(
    checker: ModuleType, entries: dict[str, bytes], architectures: tuple[str, ...], text: str
) -> None:
    found = list(checker.findings(list(checker.bundles(bundle(entries))), architectures))
    assert len(found) == 1 and text in found[0]


def test_each_source_has_a_bundle_of_its_own(checker: ModuleType) -> None:
    both = matrix("gfx90a")
    halves = [{k: v for k, v in both.items() if k.startswith(start)} for start in ("rows", "wgrad")]
    section = b"".join(bundle({"gfx90a": elf(0x3F, half)}) for half in halves)
    assert list(checker.findings(list(checker.bundles(section)), ("gfx90a",))) == []


def test_a_library_without_code_for_amd_lacks_all(checker: ModuleType) -> None:
    assert len(list(checker.findings([], BOTH))) == 3


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (0x45, ["lacks the matrix instruction 0x3e", "has the matrix instruction 0x45 of another dtype"]),
        (0x33, ["lacks the matrix instruction 0x3e"]),
    ],
)
def test_the_matrix_instruction_is_that_of_the_dtype(
    checker: ModuleType, number: int, texts: list[str]
) -> None:
    code = {"gfx942": elf(0x4C, {"rows": ()} | matrix("gfx942", wgrad_4Tf32=number))}
    found = list(checker.findings(list(checker.bundles(bundle(code))), ("gfx942",)))
    assert [line.removeprefix("gfx942: wgrad_mfma_4Tf32 ") for line in found] == texts


def test_a_kernel_that_wants_too_much_shared_memory(checker: ModuleType) -> None:
    code = {"gfx90a": elf(0x3F, shared=(64 << 10) + 16)}
    found = list(checker.findings(list(checker.bundles(bundle(code))), ("gfx90a",)))
    assert len(found) == 11 and all("wants 65552 bytes of shared memory" in line for line in found)
