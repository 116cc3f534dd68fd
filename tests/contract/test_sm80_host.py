"""The kernels for Ampere and later, compiled for the host: a wrong lane, row, piece, tail or barrier.

A block's threads are fibers here, copies into shared memory arrive when they are waited for, and the matrix
instructions are computed from what PTX says of where each lane keeps its numbers; all else is the source
that nvcc compiles. It cannot show a race that only real warps run, nor the float64 instruction of Hopper,
which the kernels build of two of Ampere's here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from contract import test_mfma_host
from contract.gpu_stand_in import kit
from gpu.kit import Case, laid_out, make
from hypothesis import given
from hypothesis import strategies as st

from multigemm import _abi

HERE = Path(__file__).resolve().parent
KERNELS = kit.ROOT / "shared" / "kernels" / "grouped_mm"
SOURCES = [
    *(KERNELS / name for name in ("rows_sm80.cu", "wgrad_sm80.cu", "simt.cu")),
    kit.HERE / "stand_in.cpp",
    HERE / "sm80_stand_in" / "calls.cpp",
]
MULTIPROCESSORS = 30


@dataclass(frozen=True)
class Done:
    reason: str  # why it was refused
    room: int  # bytes of workspace


class Kernels:
    """The library, and calls of it as if on a chip with so many multiprocessors."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def run(self, problem: Any, multiprocessors: int = MULTIPROCESSORS) -> Done:
        rows = isinstance(problem, _abi.GroupedMM)
        function = self.library.sm80_rows if rows else self.library.sm80_wgrad
        text, room = ctypes.create_string_buffer(200), ctypes.c_int64()
        status = function(ctypes.byref(problem), multiprocessors, ctypes.byref(room), text, len(text))
        assert (status == -1) == bool(text.value) and status in (0, -1), status
        return Done(text.value.decode(), room.value)

    def room(self, n: int, g: int, k: int, m: int, b: int, dtype: torch.dtype, chip: int = 132) -> int:
        """Bytes that a weight gradient of these sizes asks for."""
        x, gy = (torch.empty(n, b, width, dtype=dtype, device="meta") for width in (k, m))
        dw = torch.empty(g, b, k, m, dtype=dtype, device="meta")
        problem = _abi.grouped_mm_wgrad_problem(x, gy, torch.empty(g, dtype=torch.int64), False, False, dw)
        self.library.sm80_wgrad_room.restype = ctypes.c_int64
        return int(self.library.sm80_wgrad_room(ctypes.byref(problem), chip))

    def parts(self, sizes: list[int], rows: int, height: int, threads: int) -> tuple[Any, list[int]]:
        """Begin, end, whether a whole group, and the number of each part; the groups that are cut."""
        count = len(sizes)
        given = (ctypes.c_int64 * count)(*sizes)
        most = count + rows // height + 2
        out, cut = (ctypes.c_int32 * (1 + 4 * most))(), (ctypes.c_int32 * (1 + count))()
        function = self.library.sm80_parts
        function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 2]
        function.argtypes += [ctypes.c_void_p] * 2
        assert function(given, count, rows, height, threads, out, cut) == 0
        parts = [tuple(out[1 + 4 * i : 5 + 4 * i]) for i in range(out[0])]
        return parts, list(cut[1 : 1 + cut[0]])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if kit.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return Kernels(build(tmp_path_factory.mktemp("sm80")))


def build(folder: Path) -> Path:
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
    flags += ["-Werror", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unknown-pragmas"]
    flags += ['-DMG_VERSION="0"', "-DMG_SUFFIX=standin", f"-I{HERE / 'sm80_stand_in'}", f"-I{kit.HERE}"]
    flags += [f"-I{kit.ROOT / 'shared'}", f"-I{kit.ROOT / 'shared' / 'include'}"]
    objects = [str(folder / f"{source.name}.o") for source in SOURCES]
    for source, target in zip(SOURCES, objects, strict=True):
        kit.run([str(kit.compiler()), *flags, "-c", "-x", "c++", str(source), "-o", target])
    library = folder / "libsm80.so"
    kit.run([str(kit.compiler()), "-shared", "-o", str(library), *objects, "-Wl,-z,defs"])
    return library


# --- all kernels ----------------------------------------------------------------------------------

USUAL = (67, 0, 130, 9)
CASES = [
    *test_mfma_host.CASES,
    Case("wide", (9, 70), 136, 264, bias=True),
    Case("narrow x", USUAL, 16, 264, b=2, rest=3, bias=True),
    Case("narrow x, odd", USUAL, 11, 131, b=2, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("narrow gy", USUAL, 264, 16, b=2, rest=3, bias=True),
    Case("narrow gy, odd", USUAL, 131, 13, b=2, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("thin", (150, 0, 61), 4, 4, b=40, rest=5, bias=True),
    Case("thin, odd", (150, 0, 61), 3, 5, b=9, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("thin and long", (33, 0, 20, 7), 16, 16, b=33),
]

# Of 1024 rows and more, with a group that is tall for so many: its rows are shared out.
SKEW = (20, 0, 3, 900, 70, 260, 1, 90)
CUT = [
    Case("cut", SKEW, 24, 40),
    Case("cut, rows of no group", SKEW, 24, 40, rest=300, offsets=True, index=torch.int32),
    Case("cut, all rows in one group", (0, 0, 1031, 0, 0), 33, 20),
    Case("cut, few groups", (1024, 512, 0, 0), 20, 72),
    Case("cut, odd widths", SKEW, 19, 71, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("cut, wide", (7, 0, 1200, 0), 72, 136),
    Case("cut, of many groups", (*(1,) * 200, 900, *(0,) * 31, 90, *(2,) * 22), 17, 18),
    Case("cut, to float32", SKEW, 24, 40, out_dtype=torch.float32),
    Case("cut, batch", SKEW, 17, 20, b=2),
    Case("cut, batch, summed", SKEW, 20, 24, b=2, shared=True, x="cut"),
    Case("none cut", (*(64,) * 17,), 17, 20),
]
CUT_THIN = [  # another kernel, but for halves
    Case("cut, thin", SKEW, 4, 4, b=9, rest=20),
    Case("cut, thin and long", SKEW, 16, 12, b=33),
    Case("cut, thin and odd", SKEW, 5, 3, b=9, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("cut, thin, to float32", SKEW, 6, 7, b=8, out_dtype=torch.float32),
]
# Whose matrices are narrow and not thin, so that warps share out the rows of all groups.
SHORT = [Case("narrow", SKEW, 16, 24, b=2), Case("few rows", (500, 20, 0, 3), 24, 40)]


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=oracle.ROUNDOFF.__getitem__)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    p = make(case, dtype, "cpu")
    sizes, out_dtype = list(case.sizes), case.out_dtype or dtype
    y = filled(p.gy.shape, out_dtype)
    problem = _abi.grouped_mm_problem(p.x, p.w, p.groups, case.offsets, p.bias, y)
    assert kernels.run(problem).reason == ""
    coarse = narrowest(dtype, out_dtype)
    oracle.assert_close(y, oracle.grouped_mm(p.x, p.w, sizes, False, p.bias), coarse, case.k, 16.0)
    tail = y[sum(sizes) :]
    assert torch.equal(tail, torch.zeros_like(tail)), "rows of no group are not zero"
    wgrad(kernels, case, dtype)


def wgrad(kernels: Kernels, case: Case, dtype: torch.dtype, precision: str = "") -> Done:
    p = make(case, dtype, "cpu")
    sizes, out_dtype = list(case.sizes), case.out_dtype or dtype
    dw = laid_out(tuple(p.w.shape), "contiguous", out_dtype, torch.device("cpu")).fill_(float("nan"))
    problem = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, case.offsets, case.shared, dw, precision)
    done = kernels.run(problem)
    assert done.reason == "" and done.room <= dw.nbytes
    terms = max(sizes) * (case.b or 1 if case.shared else 1)
    coarse = torch.float16 if precision == "tf32" else narrowest(dtype, out_dtype)
    oracle.assert_close(
        dw, oracle.grouped_mm_wgrad(p.x, p.gy, sizes, False, case.shared), coarse, terms, 16.0
    )
    return done


# --- groups that are cut --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.name)
def test_tall_groups_are_cut(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    assert wgrad(kernels, case, dtype).room > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CUT_THIN, ids=lambda case: case.name)
def test_tall_groups_of_thin_matrices_are_cut(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    assert wgrad(kernels, case, dtype).room > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [*SHORT, Case("more groups than are cut", (*(1,) * 256, 1300), 17, 18)],
    ids=lambda case: case.name,
)
def test_what_is_not_cut(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    assert wgrad(kernels, case, dtype).room == 0


def test_the_workspace_is_as_large_as_the_output_where_groups_may_be_too_tall(kernels: Kernels) -> None:
    for dtype in (torch.float64, torch.float32):
        out = 89 * 128 * 128 * dtype.itemsize
        assert 0.99 * out < kernels.room(20000, 89, 128, 128, 1, dtype) <= out
        assert 0.99 * out / 8 < kernels.room(20000, 89, 4, 4, 128, dtype) <= out / 8
        assert kernels.room(2000, 89, 16, 768, 128, dtype) == 0  # its warps share out rows
        assert kernels.room(32768, 128, 2048, 1536, 1, dtype) == 0  # the tiles of one group fill the device
        assert kernels.room(500, 89, 128, 128, 1, dtype) == 0
        assert kernels.room(20000, 1, 128, 128, 1, dtype) == 0  # no room for two pieces
        assert kernels.room(20000, 1025, 128, 128, 1, dtype) == 0
        assert kernels.room(20000, 89, 128, 128, 1, dtype, chip=1) == 0
    assert kernels.room(20000, 89, 128, 128, 1, torch.bfloat16) <= 89 * 128 * 128 * 2


@pytest.mark.parametrize("case", [CUT[0], CUT[4]], ids=lambda case: case.name)
def test_tf32(kernels: Kernels, case: Case) -> None:
    assert wgrad(kernels, case, torch.float32, precision="tf32").room > 0


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_what_lies_beside_a_group_is_not_summed(kernels: Kernels, dtype: torch.dtype) -> None:
    """NaN in the rows of no group, which share tiles with the last group's, cut or not."""
    for sizes in ([70, 5, 0, 130], [70, 5, 0, 1130]):
        used = sum(sizes)
        p = make(Case("", tuple(sizes), 24, 40, rest=60, bias=True), dtype, "cpu")
        p.x[used:], p.gy[used:] = float("nan"), float("nan")
        y, dw = torch.empty_like(p.gy), torch.empty_like(p.w)
        assert kernels.run(_abi.grouped_mm_problem(p.x, p.w, p.groups, False, p.bias, y)).reason == ""
        problem = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, False, False, dw)
        assert (kernels.run(problem).room > 0) == (used > 1000)
        assert bool((y[used:] == 0).all()) and bool(y.isfinite().all()) and bool(dw.isfinite().all())


@pytest.mark.parametrize("layout", ["cut oddly", "unaligned"])
@pytest.mark.parametrize(("b", "k", "m"), [(1, 20, 34), (9, 4, 5)], ids=["tiles", "thin"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_outputs(
    kernels: Kernels, layout: str, b: int, k: int, m: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """What lies between an output's elements stays, also where pieces are joined."""
    sizes = [40, 0, 1100, 30]
    p = make(Case("", tuple(sizes), k, m, b=b, rest=3), dtype, "cpu")
    dw = laid_out(tuple(p.w.shape), layout, out_dtype, torch.device("cpu"))
    dw.fill_(float("nan"))
    done = kernels.run(_abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, False, False, dw))
    assert done.reason == "" and done.room > 0
    oracle.assert_close(
        dw, oracle.grouped_mm_wgrad(p.x, p.gy, sizes), narrowest(dtype, out_dtype), 1100, 16.0
    )
    flat = dw.as_strided((dw.untyped_storage().nbytes() // dw.itemsize,), (1,), 0)
    assert int(flat.isnan().sum()) == flat.numel() - dw.numel()


def test_the_sum_of_a_cut_group_is_that_of_its_pieces_in_order(kernels: Kernels) -> None:
    """Each piece's float32 sum is exact here; what is lost is lost in adding them, from the first on."""
    rows, height = 1280, 320  # of four groups
    x, gy = torch.zeros(rows, 20), torch.ones(rows, 20)
    firsts = torch.arange(0, rows, height)
    x[firsts] = torch.tensor([2.0**24, 1.0, 1.0, 1.0])[:, None]
    dw = torch.empty(4, 20, 20)
    sizes = torch.tensor([0, rows, 0, 0])
    assert kernels.run(_abi.grouped_mm_wgrad_problem(x, gy, sizes, False, False, dw)).room > 0
    assert bool((dw[1] == 2.0**24).all())  # from the last on it would be 2^24 + 4
    x[firsts] = torch.tensor([1.0, 1.0, 1.0, 2.0**24])[:, None]
    assert kernels.run(_abi.grouped_mm_wgrad_problem(x, gy, sizes, False, False, dw)).room > 0
    assert bool((dw[1] == 2.0**24 + 4).all())


@st.composite
def heights_and_sizes(draw: Callable[..., Any]) -> tuple[int, list[int], int]:
    height = draw(st.integers(2, 70))
    one = st.one_of(
        st.integers(0, height), st.integers(0, 12 * height), st.sampled_from([height * 3 // 2, 2 * height])
    )
    sizes = draw(st.lists(one, min_size=1, max_size=60))
    return height, sizes, sum(sizes) + draw(st.integers(0, 3 * height))


@given(heights_and_sizes(), st.sampled_from([32, 128, 256]))
def test_parts(kernels: Kernels, given: tuple[int, list[int], int], threads: int) -> None:
    """Every row of a group is in one part, and pieces have numbers of their own."""
    height, sizes, rows = given
    if sum(sizes) == 0 or rows > height << 15:
        return
    parts, cut = kernels.parts(sizes, rows, height, threads)
    cutting = len(parts) - len(sizes) + len(cut)
    pieces, whole = parts[:cutting], parts[cutting:]
    assert not any(part[2] for part in pieces) and all(part[2] for part in whole)
    assert [part[3] for part in whole] == [g for g in range(len(sizes)) if g not in cut]
    begin = 0
    for g, size in enumerate(sizes):
        if g in cut:
            of_group = [part for part in pieces if begin <= part[0] and part[1] <= begin + size]
            lengths = [part[1] - part[0] for part in of_group]
            assert of_group[0][0] == begin and of_group[-1][1] == begin + size
            assert all(a[1] == b[0] and a[3] + 1 == b[3] for a, b in pairwise(of_group))
            assert len(lengths) > 1 and max(lengths) - min(lengths) <= 1
            assert 2 * min(lengths) + 1 >= height and 2 * max(lengths) <= 3 * height + 1
        else:
            assert (begin, begin + size, 1, g) in whole and size <= 2 * height
        begin += size
    numbers = [part[3] for part in pieces]
    assert numbers == sorted(set(numbers)) and all(n < -(-rows // height) for n in numbers)


def test_one_tall_group_of_the_most_groups(kernels: Kernels) -> None:
    sizes = [1] * 1023 + [2000]
    parts, cut = kernels.parts(sizes, sum(sizes), 64, 128)
    assert cut == [1023] and len(parts) == 1023 + 32
    assert parts[0][0] == 1023 and parts[-1] == (1022, 1023, 1, 1022)
