"""Wrong values from the GPU's launch layer, which runs here over pretend devices, kernels and BLAS."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from contract.gpu_stand_in import kit
from gpu.kit import Case, laid_out, make

from multigemm import _abi

USUAL = (9, 0, 20, 4)
CASES = [
    Case("plain", USUAL, 24, 32),
    Case("rows of no group", USUAL, 16, 35, rest=5, bias=True),
    Case("offsets, transposed w", USUAL, 19, 33, w="transposed", offsets=True, index=torch.int32),
    Case("cut oddly", USUAL, 17, 7, x="cut oddly", gy="cut oddly", w="cut oddly", bias=True),
    Case("every second column", USUAL, 12, 10, x="stepped", gy="stepped", w="stepped", rest=2),
    Case("transposed x and gy", USUAL, 36, 34, x="transposed", gy="transposed", rest=1),
    Case("expanded", USUAL, 8, 12, x="expanded", gy="scalar", w="expanded"),
    Case("of one number", USUAL, 3, 2, x="scalar", gy="expanded", w="scalar", rest=1),
    Case("equal heights", (5, 5, 5, 5, 5, 5), 16, 8, bias=True, out_dtype=torch.float32),
    Case("equal heights but one", (5, 5, 5, 5, 6, 5), 16, 8, rest=1),
    Case("equal heights, some empty", (5, 0, 5, 5, 0, 0, 5), 16, 8, rest=1),
    Case("one row each", (1,) * 12, 8, 5, bias=True),
    Case("no rows", (0, 0, 0), 8, 8, rest=5, bias=True),
    Case("no rows, to float64", (0, 0, 0), 8, 8, rest=5, bias=True, out_dtype=torch.float64),
    Case("one column", USUAL, 5, 1, rest=2, bias=True, x="stepped", gy="stepped", w="transposed"),
    Case("one in depth", USUAL, 1, 6, rest=2, bias=True, x="stepped", w="stepped"),
    Case("one row", (0, 1), 6, 9, x="transposed", gy="transposed", bias=True),
    Case("to float32", USUAL, 16, 12, out_dtype=torch.float32, bias=True, rest=2),
    Case("to bfloat16", USUAL, 16, 12, out_dtype=torch.bfloat16),
    Case("a thousand groups", tuple(int(n % 40 == 0) for n in range(1030)), 3, 5, offsets=True),
    Case("thousands of groups", (0, 200, 70) + (0,) * 1500 + (1,) * 9 + (0,) * 1500 + (64,), 3, 2, rest=9),
    Case("thousands, batch, shared", (65,) + (0,) * 1500 + (43, 0, 1), 3, 2, b=3, shared=True, rest=1),
    Case("batch", (7, 0, 6, 3), 8, 10, b=3, rest=2, bias=True),
    Case("batch, to float16", (7, 0, 6, 3), 8, 10, b=3, rest=2, bias=True, out_dtype=torch.float16),
    Case("batch, shared", (7, 0, 6, 3), 8, 10, b=3, rest=2, shared=True, bias=True),
    Case("batch, shared, to float64", USUAL, 8, 10, b=3, rest=2, shared=True, out_dtype=torch.float64),
    Case(
        "batch, shared, cut", (7, 0, 6, 3), 6, 5, b=3, shared=True, bias=True, x="cut oddly", gy="cut", rest=1
    ),
    Case("batch, shared, steps", USUAL, 6, 5, b=3, shared=True, x="stepped", gy="stepped", w="stepped"),
    Case("batch, shared, transposed", (7, 0, 6, 3), 6, 5, b=3, shared=True, x="transposed", gy="expanded"),
    Case("batch, transposed", (7, 0, 6, 3), 6, 5, b=3, x="transposed", gy="transposed", w="transposed"),
    Case("batch, odd steps", (7, 0, 6, 3), 6, 5, b=3, x="stepped", gy="cut oddly", w="stepped", bias=True),
    Case("one channel", (7, 0, 6, 3), 8, 8, b=1, shared=True, rest=1),
]


@dataclass(frozen=True)
class Way:
    """An implementation, what the kernels of one architecture take, and whether products may be grouped."""

    name: str
    kernels: int = kit.PACKED
    grouped: bool = True


WAYS = [
    Way(""),
    Way("native"),
    Way("native", kit.ANYTHING),
    Way("simt"),
    Way("blas"),
    Way("blas", grouped=False),
    Way("torch"),
]


def checked(
    library: kit.Library,
    problem: Any,
    tensors: list[torch.Tensor],
    groups: torch.Tensor,
    way: Way,
    where: str,
) -> kit.Done:
    library.let(way.kernels)
    library.control["grouped_products"](way.grouped)
    problem.implementation = _abi.IMPLEMENTATIONS[way.name]
    memory = kit.Memory(library, kit.STREAM) if way.name == "torch" or where == "device" else None
    if memory is not None and way.name == "torch":
        memory.product = library.product_of(kit.STREAM)
    done = kit.call(library, problem, tensors, groups, on_host=where == "host", memory=memory)
    assert done.status == _abi.OK, done.error
    reads = [record for record in done.records if record.call == "copy_to_host"]
    assert not reads or (way.name in ("blas", "torch") and where == "device")
    return done


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=oracle.ROUNDOFF.__getitem__)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(standin: kit.Library, case: Case, dtype: torch.dtype) -> None:
    p = make(case, dtype, "cpu")
    sizes, out_dtype = list(case.sizes), case.out_dtype or dtype
    y = torch.empty(p.gy.shape, dtype=out_dtype)
    dw = torch.empty(p.w.shape, dtype=out_dtype)
    rows = oracle.grouped_mm(p.x, p.w, sizes, False, p.bias)
    wgrad = oracle.grouped_mm_wgrad(p.x, p.gy, sizes, False, case.shared)
    terms = max(sizes) * (case.b or 1 if case.shared else 1)
    coarse = narrowest(dtype, out_dtype)
    operands = [t for t in (p.x, p.w, p.bias) if t is not None]
    for way in WAYS:
        for where in ("device", "host"):
            y.fill_(float("nan"))
            problem = _abi.grouped_mm_problem(p.x, p.w, p.groups, case.offsets, p.bias, y)
            checked(standin, problem, operands, p.groups, way, where)
            oracle.assert_close(y, rows, coarse, case.k, 16.0)
            tail = y[sum(sizes) :]
            assert torch.equal(tail, torch.zeros_like(tail)), "rows of no group are not zero"
            dw.fill_(float("nan"))
            problem = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, case.offsets, case.shared, dw)
            checked(standin, problem, [p.x, p.gy], p.groups, way, where)
            oracle.assert_close(dw, wgrad, coarse, terms, 16.0)


@pytest.mark.parametrize("layout", ["transposed", "unaligned", "stepped", "cut oddly"])
@pytest.mark.parametrize("shape", [(), (3,)], ids=["no batch", "batch"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
def test_outputs_of_any_layout(
    standin: kit.Library, layout: str, shape: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = [6, 0, 9, 2]
    groups = torch.tensor(sizes)
    x, w = torch.randn(19, *shape, 5).to(dtype), torch.randn(4, *shape, 5, 7).to(dtype)
    gy, bias = torch.randn(19, *shape, 7).to(dtype), torch.randn(4, *shape, 7).to(dtype)
    y = laid_out((19, *shape, 7), layout, out_dtype, torch.device("cpu"))
    dw = laid_out((4, *shape, 5, 7), layout, out_dtype, torch.device("cpu"))
    coarse = narrowest(dtype, out_dtype)
    for way in WAYS:
        for where in ("device", "host"):
            y.fill_(float("nan"))
            dw.fill_(float("nan"))
            for given in (bias, None):
                problem = _abi.grouped_mm_problem(x, w, groups, False, given, y)
                operands = [x, w] if given is None else [x, w, given]
                checked(standin, problem, operands, groups, way, where)
                oracle.assert_close(y, oracle.grouped_mm(x, w, sizes, False, given), coarse, 5, 16.0)
            problem = _abi.grouped_mm_wgrad_problem(x, gy, groups, False, False, dw)
            checked(standin, problem, [x, gy], groups, way, where)
            oracle.assert_close(dw, oracle.grouped_mm_wgrad(x, gy, sizes), coarse, 9, 16.0)
            for out in (y, dw):  # nothing between its elements
                flat = out.as_strided((out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
                assert int(flat.isnan().sum()) == flat.numel() - out.numel()


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offsets", [False, True], ids=["sizes", "offsets"])
@pytest.mark.parametrize("shared", [None, True], ids=["no batch", "shared w"])
def test_groups_are_clamped_and_of_any_stride(
    standin: kit.Library, index: torch.dtype, offsets: bool, shared: bool | None
) -> None:
    torch.manual_seed(0)
    batch = () if shared is None else (2,)
    x, gy = torch.randn(18, *batch, 6), torch.randn(18, *batch, 4)
    w = torch.randn(4, *(() if shared is None else (1,) if shared else (2,)), 6, 4)
    y, dw = torch.empty_like(gy), torch.empty_like(w)
    extreme = torch.iinfo(index)
    for values in (
        [-5, 10, -1, 4],
        [12, 12, 12, 12],
        [7, 5, 6, 40],
        [extreme.max, extreme.max, 1, 1],
        [extreme.min, 3, extreme.max, 5],
        [0, 0, 0, 0],
    ):
        spaced = torch.tensor([values, [9] * 4], dtype=index).T.contiguous()[:, 0]
        assert spaced.stride(0) == 2
        for way in (WAYS[0], WAYS[3], WAYS[4], WAYS[6]):
            for where in ("device", "host"):
                y.fill_(float("nan"))
                dw.fill_(float("nan"))
                problem = _abi.grouped_mm_problem(x, w, spaced, offsets, None, y)
                checked(standin, problem, [x, w], spaced, way, where)
                oracle.assert_close(y, oracle.grouped_mm(x, w, values, offsets), torch.float32, 6, 16.0)
                expected = oracle.grouped_mm_wgrad(x, gy, values, offsets, bool(shared))
                problem = _abi.grouped_mm_wgrad_problem(x, gy, spaced, offsets, bool(shared), dw)
                checked(standin, problem, [x, gy], spaced, way, where)
                oracle.assert_close(dw, expected, torch.float32, 36, 16.0)


@pytest.mark.parametrize("zero", ["N", "G", "K", "M", "B"])
@pytest.mark.parametrize("shared", [False, True], ids=["own w", "shared w"])
def test_sizes_of_zero(standin: kit.Library, zero: str, shared: bool) -> None:
    size = {"N": 11, "G": 3, "K": 5, "M": 4, "B": 2, zero: 0}
    n, g, k, m, b = (size[name] for name in "NGKMB")
    torch.manual_seed(0)
    x, gy, bias = torch.randn(n, b, k), torch.randn(n, b, m), torch.randn(g, 1 if shared else b, m)
    w = torch.randn(g, 1 if shared else b, k, m)
    values = [4, 0, 6][:g]
    groups = torch.tensor(values, dtype=torch.int64)
    for way in WAYS:
        for where in ("device", "host"):
            for given in (bias, None):
                y = torch.full((n, b, m), float("nan"))
                problem = _abi.grouped_mm_problem(x, w, groups, False, given, y)
                checked(standin, problem, [x, w], groups, way, where)
                oracle.assert_close(y, oracle.grouped_mm(x, w, values, False, given), torch.float32, k, 16.0)
                assert standin.explain(problem) is not None, standin.last_error()
            dw = torch.full(w.shape, float("nan"))
            problem = _abi.grouped_mm_wgrad_problem(x, gy, groups, False, shared, dw)
            checked(standin, problem, [x, gy], groups, way, where)
            expected = oracle.grouped_mm_wgrad(x, gy, values, False, shared)
            oracle.assert_close(dw, expected, torch.float32, 12, 16.0)
            assert standin.explain(problem) is not None, standin.last_error()


def test_explain_tells_what_the_call_does(standin: kit.Library) -> None:
    """The kernel that is named runs, and what is said to be copied is."""
    for case in CASES[:8:2]:
        for dtype in (torch.float32, torch.bfloat16):
            p = make(case, dtype, "cpu")
            y, dw = torch.empty(p.gy.shape, dtype=dtype), torch.empty(p.w.shape, dtype=dtype)
            for way in WAYS:
                for where in ("device", "host"):
                    rows = _abi.grouped_mm_problem(p.x, p.w, p.groups, case.offsets, p.bias, y)
                    wgrad = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, case.offsets, False, dw)
                    for problem, other in ((rows, p.w), (wgrad, p.gy)):
                        done = checked(standin, problem, [p.x, other], p.groups, way, where)
                        # The host that was lent is gone, and so are the group sizes.
                        host = _abi.Host()
                        if way.name == "torch":
                            host.matmul = _abi.HostMatmul(lambda *_: 1)
                        problem.host, problem.groups.data = ctypes.pointer(host), p.groups.data_ptr()
                        told = standin.explain(problem)
                        assert told is not None, standin.last_error()
                        kernel = told["kernel"]
                        ran = set(done.calls())
                        if "_sm" in kernel:
                            assert kernel in ran
                        assert (kernel == "blas") == bool(ran & {"blas_product", "blas_products"})
                        copies = sum(f"{name} is copied" in told["why"] for name in ("x", "gy"))
                        packs = 1 + copies + (1 if where == "host" else 0)
                        if "_sm" in kernel:
                            assert done.calls().count("launch") == packs + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
@pytest.mark.parametrize("sizes", [USUAL, (8, 8, 8, 8)], ids=["any heights", "equal heights"])
def test_results_are_rounded_once(
    standin: kit.Library,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    layout: str,
    sizes: tuple[int, ...],
) -> None:
    """Sums of halves reach a wider result unrounded, and take their bias before they are rounded."""
    out_dtype = out_dtype or dtype
    p = make(Case("", sizes, 40, 24, rest=1, bias=True), dtype, "cpu")
    y = laid_out(p.gy.shape, layout, out_dtype, torch.device("cpu"))
    dw = laid_out(p.w.shape, layout, out_dtype, torch.device("cpu"))
    rows = oracle.grouped_mm(p.x, p.w, list(sizes), False, p.bias)
    wgrad = oracle.grouped_mm_wgrad(p.x, p.gy, list(sizes))
    for way in WAYS:
        for where in ("device", "host"):
            for out, expected in ((y, rows), (dw, wgrad)):
                out.fill_(float("nan"))
                if out is y:
                    problem: Any = _abi.grouped_mm_problem(p.x, p.w, p.groups, False, p.bias, y)
                    operands = [p.x, p.w, p.bias]
                else:
                    problem = _abi.grouped_mm_wgrad_problem(p.x, p.gy, p.groups, False, False, dw)
                    operands = [p.x, p.gy]
                checked(standin, problem, operands, p.groups, way, where)
                least = (expected.to(out_dtype).double() - expected).abs()
                error = (out.double() - expected).abs()
                assert bool((error <= least + 1e-4).all()), (way, where, (error - least).max())
