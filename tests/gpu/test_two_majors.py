"""Two CUDA majors in one process through the C ABI: each with its own runtime, kernels and BLAS handles.

Class of failure: a handle that one major of cuBLAS made is given to functions of the other, which have the
same names (https://github.com/pytorch/pytorch/issues/88882). Neither library may meet the other's functions.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from gpu import kit

from multigemm import _abi, _discovery, _opening
from multigemm._resolution import _front

MAJORS = ("cu12", "cu13")
SIZES = [40, 0, 110, 90, 6]
ROWS, K, M = sum(SIZES) + 7, 64, 48
NAMES = ("", "native", "simt")


@dataclass
class Opened:
    """One backend, opened as arrays of other libraries than PyTorch reach it."""

    backend: Any
    library: _abi.Library
    blas: bool

    @property
    def major(self) -> int:
        return int(self.backend.info["major"])


@pytest.fixture(scope="module")
def both() -> list[Opened]:
    installed = {c.name: c for c in _discovery.installed()}
    if missing := [name for name in MAJORS if name not in installed]:
        pytest.skip(f"{', '.join(missing)} is not installed beside the other major")
    opened = []
    for name in MAJORS:
        backend = _opening.open_core(installed[name], _front(), [])
        opened.append(Opened(backend, _abi.Library(backend.handle, name), not kit.lacks_blas(backend)))
    return opened


class Problem:
    """Operands, results full of NaN, and the call of one backend for both operators."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        self.dtype = dtype
        self.x, self.w, self.gy = normal(ROWS, K), normal(len(SIZES), K, M), normal(ROWS, M)
        self.groups = torch.tensor(SIZES, device="cuda")
        self.y, self.dw = torch.empty_like(self.gy), torch.empty_like(self.w)
        self.clear()

    def clear(self) -> None:
        self.y.fill_(float("nan"))
        self.dw.fill_(float("nan"))

    def run(self, opened: Opened, name: str = "", stream: int | None = None) -> None:
        """Each call on the stream's handle; without one, on PyTorch's current stream."""
        for problem in (
            _abi.grouped_mm_problem(self.x, self.w, self.groups, False, None, self.y, "", name, stream),
            _abi.grouped_mm_wgrad_problem(
                self.x, self.gy, self.groups, False, False, self.dw, "", name, stream
            ),
        ):
            assert opened.library.call(problem) == _abi.OK, opened.library.last_error()

    def check(self) -> None:
        oracle.assert_close(self.y, oracle.grouped_mm(self.x, self.w, SIZES), self.dtype, K, 16.0)
        expected = oracle.grouped_mm_wgrad(self.x, self.gy, SIZES)
        oracle.assert_close(self.dw, expected, self.dtype, max(SIZES), 16.0)


def mapped() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8") as stream:
        return {line.rstrip("\n").rpartition("/")[2] for line in stream if ".so" in line}


def test_each_has_libraries_of_its_own(both: list[Opened]) -> None:
    here = mapped()
    for opened in both:
        assert {f"lib{part}.so.{opened.major}" for part in ("cublas", "cublasLt")} <= here
        query = opened.library.query()
        print(query)
        assert query["name"] == opened.backend.name
        if opened.blas:
            assert query["blas_version"] // 10000 == opened.major
    for opened, other in zip(both, reversed(both), strict=True):
        with pytest.raises(AttributeError):
            opened.backend.handle[f"mg_query_{other.backend.name}"]


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_calls_in_turn(both: list[Opened], dtype: torch.dtype, name: str) -> None:
    p = Problem(dtype)
    for opened in both * 3:
        p.clear()
        p.run(opened, name)
        p.check()


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
def test_the_same_hopper_kernels_are_chosen(both: list[Opened], dtype: torch.dtype) -> None:
    p = Problem(dtype)
    problem = _abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, p.y, "", "")
    told = [opened.library.explain(problem) for opened in both]
    assert told[0] is not None and told[1] is not None
    assert told[0]["kernel"] == told[1]["kernel"]


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
def test_threads_on_streams_of_their_own(both: list[Opened], dtype: torch.dtype) -> None:
    problems = [Problem(dtype, seed) for seed in range(4)]
    torch.cuda.synchronize()
    barrier, failures = threading.Barrier(4), []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            barrier.wait()
            for turn in range(20):
                with torch.cuda.stream(stream):
                    problems[index].clear()
                    problems[index].run(both[(index + turn) % 2], stream=stream.cuda_stream)
                stream.synchronize()
                problems[index].check()
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_one_graph_holds_launches_of_both(both: list[Opened]) -> None:
    problems = [Problem(torch.bfloat16, seed) for seed in range(2)]
    for problem, opened in zip(problems, both, strict=True):
        problem.run(opened)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for problem, opened in zip(problems, both, strict=True):
            problem.run(opened)
    for _ in range(3):
        for problem in problems:
            problem.clear()
        graph.replay()
        torch.cuda.synchronize()
        for problem in problems:
            problem.check()


def test_a_blas_answers_for_its_own_major_alone(both: list[Opened]) -> None:
    """In turn, so that a handle which went astray would meet the other's functions."""
    p = Problem(torch.float32)
    sizes = p.groups.cpu()
    for opened in both * 2:
        p.clear()
        problem = _abi.grouped_mm_problem(p.x, p.w, sizes, False, None, p.y, "", "blas")
        status = opened.library.call(problem)
        if opened.blas:
            assert status == _abi.OK, opened.library.last_error()
            oracle.assert_close(p.y, oracle.grouped_mm(p.x, p.w, SIZES), p.dtype, K, 16.0)
        else:
            text = opened.library.last_error()
            assert status != _abi.OK and f"libcublas.so.{opened.major}" in text, text
            p.run(opened)
            p.check()


def with_cupy(call: Callable[[Any, _abi.Library], None], both: list[Opened]) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for opened in both * 2:
            call(cupy, opened.library)
    stream.synchronize()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_arrays_of_cupy(both: list[Opened], dtype: str) -> None:
    from multigemm.interop import _arrays, _calls

    def call(cupy: Any, library: _abi.Library) -> None:
        random = cupy.random.RandomState(1)
        shapes = {"x": (ROWS, K), "w": (len(SIZES), K, M), "gy": (ROWS, M)}
        arrays = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        x, w, gy = (_arrays.adopt("test", name, array, "") for name, array in arrays.items())
        y = _arrays.adopt("test", "y", cupy.full((ROWS, M), cupy.nan, dtype=dtype), "")
        dw = _arrays.adopt("test", "dw", cupy.full((len(SIZES), K, M), cupy.nan, dtype=dtype), "")
        groups = _arrays.adopt_groups("test", "group_sizes", SIZES)  # on the host: wants workspace
        stream = int(cupy.cuda.get_current_stream().ptr)
        for problem in (
            _abi.grouped_mm_problem(x, w, groups, False, None, y, "", "native", stream),
            _abi.grouped_mm_wgrad_problem(x, gy, groups, False, False, dw, "", "native", stream),
        ):
            problem.host = ctypes.pointer(_calls._pool_host())
            assert library.call(problem) == _abi.OK, library.last_error()
        kind = getattr(torch, dtype)
        host = {name: torch.from_numpy(cupy.asnumpy(array)) for name, array in arrays.items()}
        found = torch.from_numpy(cupy.asnumpy(y.array)), torch.from_numpy(cupy.asnumpy(dw.array))
        oracle.assert_close(found[0], oracle.grouped_mm(host["x"], host["w"], SIZES), kind, K, 16.0)
        expected = oracle.grouped_mm_wgrad(host["x"], host["gy"], SIZES)
        oracle.assert_close(found[1], expected, kind, max(SIZES), 16.0)

    with_cupy(call, both)
    assert _calls._lent == {}, "a workspace was not given back"
