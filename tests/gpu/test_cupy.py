"""CuPy arrays through the C ABI: values, CuPy's current stream and device, foreign arrays, memory, errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch

from multigemm import errors, interop
from multigemm.interop import _calls

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
mm, wgrad = interop.grouped_mm, interop.grouped_mm_wgrad

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}
SIZES = [40, 0, 110, 90, 6]
ROWS, K, M = sum(SIZES) + 7, 64, 48

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@pytest.fixture(scope="module")
def spin() -> Any:
    """A kernel that keeps a stream busy for about a quarter of a second."""
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel.compile()
    return lambda: kernel((1,), (1,), (cupy.int64(500_000_000),))


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    assert _calls._lent == {}, "a workspace was not given back"


def normal(*shape: int, dtype: str = "float64") -> Any:
    return cupy.random.RandomState(sum(shape)).standard_normal(shape).astype(dtype)


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(cupy.asnumpy(array).copy())


def operands(dtype: str = "float64", batch: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
    g = len(SIZES)
    shapes = (ROWS, *batch, K), (g, *batch, K, M), (ROWS, *batch, M)
    x, w, gy = (normal(*shape, dtype=dtype) for shape in shapes)
    return x, w, gy


def check(y: Any, dw: Any, x: Any, w: Any, gy: Any, dtype: str) -> None:
    kind = DTYPES[dtype]
    oracle.assert_close(tensor(y), oracle.grouped_mm(tensor(x), tensor(w), SIZES), kind, K, 16.0)
    expected = oracle.grouped_mm_wgrad(tensor(x), tensor(gy), SIZES)
    oracle.assert_close(tensor(dw), expected, kind, max(SIZES), 16.0)


@pytest.mark.parametrize("where", ["cupy", "numpy", "list", "offsets"])
@pytest.mark.parametrize("name", [None, "native", "blas", "simt"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["rows", "batch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: str, batch: tuple[int, ...], name: str | None, where: str) -> None:
    x, w, gy = operands(dtype, batch)
    keyword = {
        "cupy": {"group_sizes": cupy.array(SIZES)},
        "numpy": {"group_sizes": cupy.asnumpy(cupy.array(SIZES, dtype="int32"))},
        "list": {"group_sizes": SIZES},
        "offsets": {"offsets": cupy.cumsum(cupy.array(SIZES), dtype="int32")},
    }[where]
    y = mm(x, w, **keyword, implementation=name)
    dw = wgrad(x, gy, **keyword, implementation=name)
    assert isinstance(y, cupy.ndarray) and isinstance(dw, cupy.ndarray) and y.dtype == dw.dtype == x.dtype
    check(y, dw, x, w, gy, dtype)
    assert not y[sum(SIZES) :].any()


@pytest.mark.parametrize("layout", ["transposed", "sliced", "reversed", "expanded", "unaligned"])
def test_layouts(layout: str) -> None:
    change = {
        "transposed": lambda a: cupy.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
        "sliced": lambda a: cupy.repeat(a, 2, axis=-1)[..., ::2],
        "reversed": lambda a: a[::-1].copy()[::-1],
        # Eighths: the error of a sum of equal terms would grow with their number.
        "expanded": lambda a: cupy.broadcast_to(cupy.rint(a[:1] * 8) / 8, a.shape),
        "unaligned": lambda a: cupy.concatenate([a.ravel()[:1], a.ravel()])[1:].reshape(a.shape),
    }[layout]
    for dtype in DTYPES:
        x, w, gy = (change(a) for a in operands(dtype))
        check(mm(x, w, SIZES), wgrad(x, gy, SIZES), x, w, gy, dtype)


def test_bias_out_and_out_dtype() -> None:
    x, w, _ = operands("float16")
    bias = normal(len(SIZES), M, dtype="float16")
    y = mm(x, w, SIZES, bias=bias, out_dtype="float32")
    assert y.dtype == cupy.float32
    expected = oracle.grouped_mm(tensor(x), tensor(w), SIZES, False, tensor(bias))
    oracle.assert_close(tensor(y), expected, torch.float16, K, 16.0)
    out = cupy.full((ROWS, 2 * M), cupy.nan, dtype="float32")
    view = out[:, ::2]
    assert mm(x, w, cupy.array(SIZES), bias=bias, out=view) is view
    assert cupy.array_equal(view, mm(x, w, cupy.array(SIZES), bias=bias, out_dtype=cupy.float32))
    assert cupy.isnan(out[:, 1::2]).all()


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x, w, _ = operands("float32")
    rounded = [tensor(a).bfloat16() for a in (x, w)]
    foreign = [t.cuda() for t in rounded]
    expected = oracle.grouped_mm(*rounded, SIZES)
    y = mm(x, w, SIZES, out_dtype="bfloat16")
    assert y.dtype == ml_dtypes.bfloat16
    y = mm(*foreign, SIZES, out_dtype="float32")  # PyTorch's tensors, by DLPack
    oracle.assert_close(tensor(y), expected, torch.bfloat16, K, 16.0)


def test_the_current_stream(spin: Any) -> None:
    x, w, gy = operands()
    ready = x.copy()
    sizes = cupy.array(SIZES)
    x[...] = ready
    mm(x, w, sizes), wgrad(x, gy, sizes).copy(), mm(x, w, SIZES)  # what is loaded at first use is there now
    x[...] = 0
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        spin()
        x[...] = ready
        y, dw = mm(x, w, sizes), wgrad(x, gy, sizes)
        copies = y.copy(), dw.copy()
        host = mm(x, w, SIZES)
    assert not side.done, "the calls waited for the device"
    side.synchronize()
    check(y, dw, ready, w, gy, "float64")
    check(*copies, ready, w, gy, "float64")
    check(host, dw, ready, w, gy, "float64")


def test_capture_and_replay_with_other_sizes() -> None:
    x, w, gy = operands("float16")
    sizes = cupy.array(SIZES)
    y, dw = mm(x, w, sizes), wgrad(x, gy, sizes)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        mm(x, w, sizes, out=y)
        wgrad(x, gy, sizes, out=dw)
        graph = stream.end_capture()
    for values in (SIZES, SIZES[::-1], [0, 0, 0, 0, 0], [ROWS, 9, 9, 9, 9]):
        sizes[...] = cupy.array(values)
        y.fill(cupy.nan)
        dw.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        stream.synchronize()
        oracle.assert_close(
            tensor(y), oracle.grouped_mm(tensor(x), tensor(w), values), torch.float16, K, 16.0
        )
        expected = oracle.grouped_mm_wgrad(tensor(x), tensor(gy), values)
        oracle.assert_close(tensor(dw), expected, torch.float16, ROWS, 16.0)


class Foreign:
    """An array of a library that knows ``__cuda_array_interface__`` alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.array.__cuda_array_interface__)


def test_foreign_arrays() -> None:
    x, w, gy = operands()
    y, dw = mm(x, w, cupy.array(SIZES)), wgrad(x, gy, cupy.array(SIZES))
    wrapped = [Foreign(a) for a in (x, w, gy, cupy.array(SIZES))]
    assert cupy.array_equal(mm(wrapped[0], wrapped[1], wrapped[3]), y)
    assert cupy.array_equal(wgrad(wrapped[0], wrapped[2], wrapped[3]), dw)
    out = torch.full((ROWS, M), float("nan"), dtype=torch.float64, device="cuda")
    tensors = [torch.from_dlpack(a) for a in (x, w, cupy.array(SIZES))]
    assert mm(*tensors, out=out) is out
    torch.cuda.synchronize()
    assert cupy.array_equal(cupy.from_dlpack(out), y)


def test_bad_calls() -> None:
    x, w, _ = operands()
    with pytest.raises(errors.DeviceError, match="w must be on the device of x, cuda:0, got cpu"):
        mm(x, cupy.asnumpy(w), SIZES)
    with pytest.raises(
        errors.DeviceError, match="group_sizes must be on the device of x, cpu, or on the CPU"
    ):
        mm(cupy.asnumpy(x), cupy.asnumpy(w), cupy.array(SIZES))
    with pytest.raises(errors.DTypeError, match="w must have the dtype of x, float64, got float32"):
        mm(x, w.astype("float32"), SIZES)
    with pytest.raises(errors.ShapeError, match="the inner sizes K must agree"):
        mm(x, w[:, 1:], SIZES)
    with pytest.raises(errors.ShapeError, match="must not share memory with an operand"):
        mm(x, w, SIZES, out=cupy.ndarray((ROWS, M), dtype=x.dtype, memptr=x.data))


@pytest.mark.parametrize("name", ["blas", "simt"])
def test_a_result_of_another_dtype(name: str) -> None:
    x, w, _ = operands()
    y = mm(x, w, SIZES, out_dtype="float32", implementation=name)
    assert y.dtype == cupy.float32
    cupy.testing.assert_allclose(y, mm(x, w, SIZES), rtol=1e-5, atol=1e-5)


def test_wrong_sizes_are_refused_where_checks_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = operands()
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    with pytest.raises(
        errors.GroupSizesError, match=r"group_sizes must not be negative, got group_sizes\[1\] = -3"
    ):
        mm(x, w, cupy.array([1, -3, 1, 1, 1]))


def test_a_pool_without_memory() -> None:
    """Sizes on the host need a few bytes of workspace."""
    x, w, _ = operands()
    y = mm(x, w, SIZES)
    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.get_limit()
    lent = []
    try:
        pool.set_limit(size=max(pool.total_bytes(), 1))
        while True:  # what is still free in blocks that are in use
            try:
                lent.append(cupy.cuda.alloc(512))
            except cupy.cuda.memory.OutOfMemoryError:
                break
        with pytest.raises(errors.NativeError) as caught:
            mm(x, w, SIZES, out=y, implementation="simt")
    finally:
        pool.set_limit(size=before)
        lent.clear()
    assert caught.value.status == "MG_OUT_OF_MEMORY"
    assert cupy.array_equal(mm(x, w, SIZES, out=y), mm(x, w, SIZES))


@pytest.mark.two_gpus
def test_the_arrays_device_is_used(spin: Any) -> None:
    with cupy.cuda.Device(1):
        x, w, gy = operands()
        ready = x.copy()
        x[...] = 0
        side = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with side:
            spin()
            x[...] = ready
            with cupy.cuda.Device(0):
                y, dw = mm(x, w, SIZES), wgrad(x, gy, SIZES)
                assert cupy.cuda.Device().id == 0
        side.synchronize()
    assert y.device.id == dw.device.id == 1 and cupy.cuda.Device().id == 0
    with cupy.cuda.Device(1):
        check(y, dw, ready, w, gy, "float64")
    with pytest.raises(errors.DeviceError, match="w must be on the device of x, cuda:1, got cuda:0"):
        mm(x, cupy.ones((5, K, M)), SIZES)
    assert cupy.cuda.Device().id == 0


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import cupy
from multigemm import errors, interop
x, w = cupy.ones((6, 8)), cupy.ones((2, 8, 4))
y = interop.grouped_mm(x, w, cupy.array([2, 3]))
assert isinstance(y, cupy.ndarray) and float(y.sum()) == 5 * 8 * 4, y
dw = interop.grouped_mm_wgrad(x, y, [2, 3])
assert float(dw.sum()) == 5 * 8 * 4 * 8, dw
assert not [name for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module]
print("without PyTorch")
"""


def test_without_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without PyTorch" in done.stdout
