"""The kernels for AMD's matrix cores, compiled for the host: a wrong lane, row, tail or barrier.

A block's threads are fibers here, and the matrix instruction is computed from what AMD publishes of where
each lane keeps its numbers; all else is the very source that clang compiles for gfx90a and gfx942. It
shows wrong places and missing barriers; it cannot show a race that only real wavefronts run.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from contract.gpu_stand_in import kit
from gpu.kit import Case, laid_out, make

from multigemm import _abi

HERE = Path(__file__).resolve().parent
KERNELS = kit.ROOT / "shared" / "kernels" / "grouped_mm"
SOURCES = [
    *(KERNELS / name for name in ("rows_mfma.cu", "wgrad_mfma.cu", "simt.cu")),
    kit.HERE / "stand_in.cpp",
    HERE / "mfma_stand_in" / "calls.cpp",
]
# Multiprocessors: tiles have 64 rows and columns, and 128 where each multiprocessor, the only one, gets some.
SMALL, LARGE = 30, 1
GFX90A, GFX942 = 0, 4

USUAL = (67, 0, 130, 9)
CASES = [
    Case("aligned", USUAL, 64, 128),
    Case("rows of no group", USUAL, 32, 72, rest=70, bias=True),
    Case("transposed w", USUAL, 40, 64, w="transposed", offsets=True, index=torch.int32),
    Case("odd widths, transposed w", USUAL, 35, 131, w="transposed", bias=True, rest=3),
    Case("odd address", USUAL, 32, 40, x="unaligned", w="unaligned", gy="unaligned"),
    Case("cut", USUAL, 40, 24, x="cut", gy="cut", w="cut"),
    Case("cut oddly", USUAL, 40, 72, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("expanded", USUAL, 16, 48, x="expanded", w="expanded"),
    Case("one row each", (1,) * 9, 24, 33, bias=True),
    Case("no rows", (0, 0, 0), 16, 16, rest=70, bias=True),
    Case("one in depth", USUAL, 1, 6, bias=True),
    Case("one column", USUAL, 5, 1, rest=2),
    Case("thousands of groups", (0, 3, 70, *(0,) * 1500, 1, 0, 2), 5, 6, rest=9, offsets=True),
    Case("most groups that a block counts", (1, *(0,) * 1000, 66, *(0,) * 20, 3, 0), 4, 3, rest=1),
    Case("to float32", USUAL, 16, 70, out_dtype=torch.float32, bias=True),
    Case("batch", (33, 0, 20, 7), 20, 34, b=2, rest=4, bias=True),
    Case("batch, summed", (33, 0, 20, 7), 20, 34, b=2, rest=4, shared=True, bias=True),
]


class Kernels:
    """The library, and calls of it as if on a chip with so many multiprocessors."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def run(self, problem: Any, chip: int = GFX942, multiprocessors: int = SMALL) -> str:
        """The reason if the problem is refused."""
        rows = isinstance(problem, _abi.GroupedMM)
        function = self.library.mfma_rows if rows else self.library.mfma_wgrad
        text = ctypes.create_string_buffer(200)
        status = function(ctypes.byref(problem), chip, multiprocessors, text, len(text))
        assert (status == -1) == bool(text.value) and status in (0, -1), status
        return text.value.decode()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if kit.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return Kernels(build(tmp_path_factory.mktemp("mfma")))


def build(folder: Path) -> Path:
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
    flags += ["-Werror", "-Wno-unused-function", '-DMG_VERSION="0"', "-DMG_SUFFIX=standin"]
    flags += [f"-I{kit.HERE}", f"-I{kit.ROOT / 'shared'}", f"-I{kit.ROOT / 'shared' / 'include'}"]
    objects = [str(folder / f"{source.name}.o") for source in SOURCES]
    for source, target in zip(SOURCES, objects, strict=True):
        kit.run([str(kit.compiler()), *flags, "-c", "-x", "c++", str(source), "-o", target])
    library = folder / "libmfma.so"
    kit.run([str(kit.compiler()), "-shared", "-o", str(library), *objects, "-Wl,-z,defs"])
    return library


# --- the instruction ------------------------------------------------------------------------------

# AMD's matrix instruction calculator, "Matrix element to register mapping": of element [i][k] of A the lane
# and the place among what the lane gives, and of element [i][j] of C and D; B's are A's, transposed.
INSTRUCTIONS: list[tuple[int, torch.dtype, int, Callable[..., Any], Callable[..., Any]]] = [
    (0, torch.bfloat16, 16, lambda i, k: (16 * (k // 4) + i, k % 4), lambda i, j: (16 * (i // 4) + j, i % 4)),
    (1, torch.float16, 16, lambda i, k: (16 * (k // 4) + i, k % 4), lambda i, j: (16 * (i // 4) + j, i % 4)),
    (2, torch.float32, 4, lambda i, k: (16 * k + i, 0), lambda i, j: (16 * (i // 4) + j, i % 4)),
    (3, torch.float32, 8, lambda i, k: (16 * (k // 2) + i, k % 2), lambda i, j: (16 * (i // 4) + j, i % 4)),
    (4, torch.float64, 4, lambda i, k: (16 * k + i, 0), lambda i, j: (16 * (i % 4) + j, i // 4)),
]


@pytest.mark.parametrize(("kind", "dtype", "depth", "place", "out_place"), INSTRUCTIONS)
def test_the_instruction_that_is_emulated_has_amds_layout(
    kernels: Kernels, kind: int, dtype: torch.dtype, depth: int, place: Any, out_place: Any
) -> None:
    torch.manual_seed(kind)
    a, b = (torch.randint(-8, 9, (16, depth)).to(dtype) for _ in range(2))  # b as its transpose
    sums_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    start = torch.randint(-8, 9, (16, 16)).to(sums_dtype)
    given_a, given_b = (torch.zeros(64, depth // 4, dtype=dtype) for _ in range(2))
    sums = torch.zeros(64, 4, dtype=sums_dtype)
    for i in range(16):
        for k in range(depth):
            given_a[place(i, k)], given_b[place(i, k)] = a[i, k], b[i, k]
        for j in range(16):
            sums[out_place(i, j)] = start[i, j]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (given_a, given_b, sums)]
    assert kernels.library.mfma_instruction(kind, *pointers) == 0
    expected = start + a.to(sums_dtype) @ b.to(sums_dtype).mT
    found = torch.tensor([[sums[out_place(i, j)] for j in range(16)] for i in range(16)], dtype=sums_dtype)
    assert torch.equal(found, expected)


# --- the kernels ----------------------------------------------------------------------------------


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=oracle.ROUNDOFF.__getitem__)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    p = make(case, dtype, "cpu")
    sizes, out_dtype = list(case.sizes), case.out_dtype or dtype
    expected = oracle.grouped_mm(p.x, p.w, sizes, False, p.bias)
    expected_dw = oracle.grouped_mm_wgrad(p.x, p.gy, sizes, False, case.shared)
    terms = max(sizes) * (case.b or 1 if case.shared else 1)
    coarse = narrowest(dtype, out_dtype)
    found = []
    for multiprocessors in (SMALL, LARGE):
        y = torch.full(p.gy.shape, float("nan"), dtype=out_dtype)
        problem = _abi.grouped_mm_problem(p.x, p.w, p.groups, case.offsets, p.bias, y)
        assert kernels.run(problem, multiprocessors=multiprocessors) == ""
        oracle.assert_close(y, expected, coarse, case.k, 16.0)
        tail = y[sum(sizes) :]
        assert torch.equal(tail, torch.zeros_like(tail)), "rows of no group are not zero"
        dw = torch.full(p.w.shape, float("nan"), dtype=out_dtype)
        problem = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, case.offsets, case.shared, dw)
        assert kernels.run(problem, multiprocessors=multiprocessors) == ""
        oracle.assert_close(dw, expected_dw, coarse, terms, 16.0)
        found.append((y, dw))
    # A number is summed in one order, whatever the tile: the same bits on any chip.
    assert all(torch.equal(small, large) for small, large in zip(*found, strict=True))


@pytest.mark.parametrize("multiprocessors", [SMALL, LARGE], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_what_lies_beside_a_group_is_not_summed(
    kernels: Kernels, dtype: torch.dtype, multiprocessors: int
) -> None:
    """NaN in the rows of no group, which share tiles with the last group's."""
    sizes = [70, 5, 130]
    p = make(Case("", tuple(sizes), 40, 72, rest=60, bias=True), dtype, "cpu")
    p.x[205:], p.gy[205:] = float("nan"), float("nan")
    y, dw = torch.empty_like(p.gy), torch.empty_like(p.w)
    problems = [
        _abi.grouped_mm_problem(p.x, p.w, p.groups, False, p.bias, y),
        _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, False, False, dw),
    ]
    for problem in problems:
        assert kernels.run(problem, multiprocessors=multiprocessors) == ""
    assert bool((y[205:] == 0).all()) and bool(y.isfinite().all()) and bool(dw.isfinite().all())


@pytest.mark.parametrize(
    ("values", "offsets"),
    [
        ([-5, 70, -1, 4], False),
        ([2**40, 2**40, 1, 1], False),
        ([90, 5, 6, 400], True),
        ([-(2**63), 3, 2**63 - 1, 5], True),
    ],
)
def test_groups_are_clamped(kernels: Kernels, values: list[int], offsets: bool) -> None:
    torch.manual_seed(0)
    x, w, gy = torch.randn(97, 20), torch.randn(4, 20, 30), torch.randn(97, 30)
    y, dw = torch.full_like(gy, float("nan")), torch.full_like(w, float("nan"))
    groups = torch.tensor(values).repeat_interleave(3)[::3]
    assert kernels.run(_abi.grouped_mm_problem(x, w, groups, offsets, None, y)) == ""
    oracle.assert_close(y, oracle.grouped_mm(x, w, values, offsets), torch.float32, 20, 16.0)
    assert kernels.run(_abi.grouped_mm_wgrad_problem(x, gy, groups, offsets, False, dw)) == ""
    oracle.assert_close(dw, oracle.grouped_mm_wgrad(x, gy, values, offsets), torch.float32, 97, 16.0)


@pytest.mark.parametrize("layout", ["transposed", "stepped", "cut oddly", "unaligned"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)], ids=str
)
def test_outputs(kernels: Kernels, layout: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """What lies between an output's elements stays; an output that is not contiguous is refused."""
    sizes = [40, 0, 30]
    p = make(Case("", tuple(sizes), 20, 34, b=2, rest=3), dtype, "cpu")
    y = laid_out(tuple(p.gy.shape), layout, out_dtype, torch.device("cpu"))
    dw = laid_out(tuple(p.w.shape), layout, out_dtype, torch.device("cpu"))
    y.fill_(float("nan"))
    dw.fill_(float("nan"))
    problems = [
        _abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, y),
        _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, False, False, dw),
    ]
    if layout in ("transposed", "stepped"):
        assert [kernels.run(problem) for problem in problems] == ["out is not contiguous along M"] * 2
        assert bool(y.isnan().all()) and bool(dw.isnan().all())
        return
    assert [kernels.run(problem) for problem in problems] == ["", ""]
    coarse = narrowest(dtype, out_dtype)
    oracle.assert_close(y, oracle.grouped_mm(p.x, p.w, sizes), coarse, 20, 16.0)
    oracle.assert_close(dw, oracle.grouped_mm_wgrad(p.x, p.gy, sizes), coarse, 40, 16.0)
    for out in (y, dw):
        flat = out.as_strided((out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
        assert int(flat.isnan().sum()) == flat.numel() - out.numel()


def test_tf32_is_rounded_to_ten_bits_only_when_asked_for(kernels: Kernels) -> None:
    x, w, y = torch.full((1, 1), 1 + 2.0**-12), torch.ones(1, 1, 1), torch.empty(1, 1)
    sizes = torch.tensor([1])
    for precision, expected in (("ieee", 1 + 2.0**-12), ("tf32", 1.0)):
        assert kernels.run(_abi.grouped_mm_problem(x, w, sizes, False, None, y, precision)) == ""
        assert y.item() == expected


def test_refusals(kernels: Kernels) -> None:
    case = Case("", (6, 4), 8, 10)

    def rows(case: Case, chip: int = GFX942, out_dtype: torch.dtype = torch.bfloat16) -> str:
        p = make(case, torch.bfloat16, "cpu")
        y = torch.empty(p.gy.shape, dtype=out_dtype)
        return kernels.run(_abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, y), chip)

    assert rows(case) == rows(case, GFX90A) == ""
    assert rows(case, 5) == "needs a gfx90a or gfx942"
    assert rows(case, out_dtype=torch.float16) == "out must have the operands' dtype or be float32"
    assert rows(replace(case, x="transposed")) == "x is not contiguous along K"
    assert rows(replace(case, w="stepped")) == "w is contiguous neither along K nor M"
    p = make(replace(case, gy="transposed"), torch.bfloat16, "cpu")
    dw = torch.empty_like(p.w)
    problem = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, False, False, dw)
    assert kernels.run(problem) == "gy is not contiguous along M"


EDGES = """
import ctypes, mmap, sys, torch
from contract.test_mfma_host import Kernels, SMALL, LARGE
from multigemm import _abi
libc, kept = ctypes.CDLL(None, use_errno=True), []
def edged(shape, dtype, at_end):
    # Between two pages that nobody may touch.
    values = torch.randn(shape).to(dtype)
    size = values.numel() * values.itemsize
    pages = -(-size // 4096)
    room = mmap.mmap(-1, (pages + 2) * 4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(start + page * 4096), 4096, 0) == 0
    offset = 4096 + (pages * 4096 - size if at_end else 0)
    kept.append(room)
    found = torch.frombuffer(room, dtype=dtype, count=values.numel(), offset=offset).view(shape)
    return found.copy_(values)
kernels = Kernels(sys.argv[1])
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    for at_end in (False, True):
        for k, m in ((35, 67), (32, 72), (3, 1)):
            x, gy = edged((135, k), dtype, at_end), edged((135, m), dtype, at_end)
            w, bias = edged((2, k, m), dtype, at_end), edged((2, m), dtype, at_end)
            y, dw = edged((135, m), dtype, at_end), edged((2, k, m), dtype, at_end)
            sizes = torch.tensor([5, 130])
            problems = [
                _abi.grouped_mm_problem(x, given, sizes, False, bias, y)
                for given in (w, edged((2, m, k), dtype, at_end).mT)
            ]
            problems.append(_abi.grouped_mm_wgrad_problem(x, gy, sizes, False, False, dw))
            for problem in problems:
                assert kernels.run(problem, 4, SMALL) == kernels.run(problem, 4, LARGE) == ""
print("done")
"""


def test_no_byte_outside_an_operand_is_touched(kernels: Kernels) -> None:
    command = [sys.executable, "-c", EDGES, str(kernels.library._name)]
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": ":".join(paths)}
    )
    assert done.stdout == "done\n", f"exit status {done.returncode}\n{done.stderr}"
