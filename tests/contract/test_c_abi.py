"""The C ABI without PyTorch's operators: values, struct sizes, and errors as a status with a message."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multigemm import _abi

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module")
def native_cpu() -> _abi.Library:
    """The installed CPU backend, opened by its path."""
    package = pytest.importorskip("multigemm_cpu", reason="multigemm-cpu is not installed")
    info = package.describe()
    for needed in info["needed"]:
        ctypes.CDLL(str(Path(info["folder"]).parent / needed["folder"] / needed["soname"]))
    # Some symbols are torch's, which `import torch` above has loaded.
    return _abi.Library(ctypes.CDLL(str(Path(info["folder"]) / info["library"])), "cpu")


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, w, gy = torch.randn(40, 3, 5), torch.randn(6, 3, 5, 7), torch.randn(40, 3, 7)
    sizes = torch.tensor([4, 0, 11, -2, 9, 6])
    return x.to(dtype), w.to(dtype), gy.to(dtype), sizes


def _blocks(sizes: torch.Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    begin = 0
    for g, size in enumerate(sizes.tolist()):
        end = min(begin + max(size, 0), rows)
        yield g, begin, end
        begin = end


def test_the_mirror_has_the_library_s_struct_sizes(native_cpu: _abi.Library) -> None:
    assert native_cpu.struct_sizes() == tuple(ctypes.sizeof(struct) for struct in _abi.STRUCTS)


def test_query_names_what_is_there(native_cpu: _abi.Library) -> None:
    query = native_cpu.query()
    assert (query["protocol"], query["abi"], query["name"], query["kind"]) == (1, _abi.ABI, "cpu", "cpu")
    assert query["kernels"]["grouped_mm"] == ["rows_simd", "rows_simt", "blas", "torch"]
    assert query["kernels"]["grouped_mm_wgrad"] == ["wgrad_simd", "wgrad_simt", "blas", "torch"]


@pytest.mark.parametrize("name", ["", "native", "blas", "simt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_mm(native_cpu: _abi.Library, dtype: torch.dtype, name: str) -> None:
    x, w, _, sizes = _operands(dtype)
    out = torch.full((40, 3, 7), float("nan"), dtype=dtype)
    problem = _abi.grouped_mm_problem(x, w, sizes, False, None, out, "", name)
    assert native_cpu.call(problem) == _abi.OK
    expected = torch.zeros(40, 3, 7, dtype=torch.float64)
    for g, begin, end in _blocks(sizes, 40):
        expected[begin:end] = torch.einsum("nbk,bkm->nbm", x[begin:end].double(), w[g].double())
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["", "native", "blas", "simt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sum_batch", [False, True], ids=["each", "summed"])
def test_grouped_mm_wgrad(native_cpu: _abi.Library, dtype: torch.dtype, name: str, sum_batch: bool) -> None:
    x, _, gy, sizes = _operands(dtype)
    out = torch.full((6, 1 if sum_batch else 3, 5, 7), float("nan"), dtype=dtype)
    problem = _abi.grouped_mm_wgrad_problem(x, gy, sizes, False, sum_batch, out, "", name)
    assert native_cpu.call(problem) == _abi.OK
    expected = torch.zeros(6, 3, 5, 7, dtype=torch.float64)
    for g, begin, end in _blocks(sizes, 40):
        expected[g] = torch.einsum("nbk,nbm->bkm", x[begin:end].double(), gy[begin:end].double())
    if sum_batch:
        expected = expected.sum(1, keepdim=True)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=16 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("dtype", 9, "dtype is 9"),
        ("out_dtype", _abi.DTYPES["int32"], "out_dtype is 5"),
        ("rows", -1, "rows is -1"),
        ("batch", -2, "batch is -2"),
        ("inner", -3, "inner is -3"),
        ("outer", -4, "outer is -4"),
        ("x", None, "x is null"),
        ("out", None, "out is null"),
        ("implementation", 77, "implementation is 77"),
        ("precision", 77, "precision is 77"),
        ("struct_size", 8, "struct_size is 8"),
    ],
)
@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad"])
def test_a_bad_problem_is_refused_by_name(
    native_cpu: _abi.Library, op: str, field: str, value: int | None, text: str
) -> None:
    problem = _problem(op)
    setattr(problem, field, value)
    assert native_cpu.call(problem) == _abi.INVALID_ARGUMENT
    message = native_cpu.last_error()
    assert message.startswith("MG_INVALID_ARGUMENT: ")
    assert text in message
    assert native_cpu.explain(problem) is None


@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad"])
def test_bad_groups_are_refused_by_name(native_cpu: _abi.Library, op: str) -> None:
    for field, value in (("data", None), ("count", -1), ("dtype", _abi.DTYPES["float32"])):
        problem = _problem(op)
        setattr(problem.groups, field, value)
        assert native_cpu.call(problem) == _abi.INVALID_ARGUMENT
        assert f"groups.{field}" in native_cpu.last_error()


_KEPT: dict[str, tuple[torch.Tensor, ...]] = {}


def _problem(op: str) -> _abi.GroupedMM | _abi.GroupedMMWgrad:
    x, w, gy, sizes = _KEPT.setdefault("operands", _operands(torch.float32))
    if op == "grouped_mm":
        (out,) = _KEPT.setdefault(op, (torch.empty(40, 3, 7),))
        return _abi.grouped_mm_problem(x, w, sizes, False, None, out)
    (out,) = _KEPT.setdefault(op, (torch.empty(6, 3, 5, 7),))
    return _abi.grouped_mm_wgrad_problem(x, gy, sizes, False, False, out)


@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad"])
def test_the_host_s_product_is_refused_where_none_is_lent(native_cpu: _abi.Library, op: str) -> None:
    problem = _problem(op)
    problem.implementation = _abi.IMPLEMENTATIONS["torch"]
    assert native_cpu.call(problem) == _abi.UNSUPPORTED
    assert "lends no matrix product" in native_cpu.last_error()


def test_explain_names_every_kernel(native_cpu: _abi.Library) -> None:
    plan = native_cpu.explain(_problem("grouped_mm"))
    assert plan is not None
    assert plan["kernel"] == "rows_simd"
    assert [other["kernel"] for other in plan["others"]] == ["rows_simt", "blas", "torch"]
    assert all(other["why_not"] for other in plan["others"])


def test_the_host_lends_threads_memory_and_a_product(native_cpu: _abi.Library) -> None:
    torch.manual_seed(0)
    x, w, sizes = (
        torch.randn(400, 3, 16),
        torch.randn(2, 3, 16, 32),
        torch.tensor([150, 250]),
    )  # enough for threads
    out = torch.full((400, 3, 32), float("nan"))
    lent: dict[int, ctypes.Array[ctypes.c_char]] = {}
    seen = {"ranges": 0, "allocated": 0, "released": 0}

    def parallel_for(context, begin, end, grain, function, argument):  # type: ignore[no-untyped-def]
        def one(i: int) -> None:
            function(i, i + 1, argument)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(begin, end)]
        seen["ranges"] += len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def allocate(context, size):  # type: ignore[no-untyped-def]
        room = ctypes.create_string_buffer(size + 64)
        address = (ctypes.addressof(room) + 63) // 64 * 64
        lent[address] = room
        seen["allocated"] += 1
        return address

    def release(context, memory):  # type: ignore[no-untyped-def]
        seen["released"] += 1
        del lent[memory]

    host = _abi.Host(
        threads=3,
        parallel_for=_abi.ParallelFor(parallel_for),
        allocate=_abi.Allocate(allocate),
        release=_abi.Release(release),
    )
    problem = _abi.grouped_mm_problem(x, w, sizes, False, None, out)
    problem.host = ctypes.pointer(host)
    assert native_cpu.call(problem) == _abi.OK
    torch.testing.assert_close(out[150:], torch.einsum("nbk,bkm->nbm", x[150:], w[1]), rtol=1e-5, atol=1e-4)
    assert seen["ranges"] == 3
    assert seen["allocated"] == seen["released"] > 0
    assert not lent

    host.allocate = _abi.Allocate(lambda context, size: None)
    assert native_cpu.call(problem) == _abi.OUT_OF_MEMORY
    assert "workspace" in native_cpu.last_error()

    host.allocate = _abi.Allocate(allocate)
    host.matmul = _abi.HostMatmul(lambda context, product: 1)
    problem.implementation = _abi.IMPLEMENTATIONS["torch"]
    assert native_cpu.call(problem) == _abi.DEVICE_ERROR
    assert "the host's matrix product failed" in native_cpu.last_error()
    assert not lent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_stay_inside_their_workspace(native_cpu: _abi.Library, dtype: torch.dtype) -> None:
    margin, mark = 16384, b"\xa5"
    lent: dict[int, tuple[ctypes.Array[ctypes.c_char], int]] = {}
    overrun = []

    def allocate(context, size):  # type: ignore[no-untyped-def]
        room = ctypes.create_string_buffer(mark * (size + margin + 64), size + margin + 64)
        address = (ctypes.addressof(room) + 63) // 64 * 64
        lent[address] = room, size
        return address

    def release(context, memory):  # type: ignore[no-untyped-def]
        _, size = lent.pop(memory)
        if ctypes.string_at(memory + size, margin) != mark * margin:
            overrun.append(size)

    host = _abi.Host(allocate=_abi.Allocate(allocate), release=_abi.Release(release))
    sizes = torch.tensor([9, 50])
    for inner in (1, 5, 33, 100, 219, 400, 700):
        for outer in (1, 2, 4, 5, 8, 17, 130):
            x, w = torch.randn(59, 2, inner).to(dtype), torch.randn(2, 2, inner, outer).to(dtype)
            bias, out = torch.randn(2, 2, outer).to(dtype), torch.empty(59, 2, outer, dtype=dtype)
            rows = _abi.grouped_mm_problem(x, w, sizes, False, bias, out)
            dw = torch.empty_like(w)  # kept: a problem holds addresses only
            wgrad = _abi.grouped_mm_wgrad_problem(x, out, sizes, False, False, dw)
            for problem in (rows, wgrad):
                problem.host = ctypes.pointer(host)
                assert native_cpu.call(problem) == _abi.OK
                assert not overrun, (inner, outer)
