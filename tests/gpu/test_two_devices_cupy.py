"""CuPy arrays on two GPUs: the array's device and CuPy's current stream of it, whatever is current."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from gpu import two_kit

from multigemm import errors, interop
from multigemm.interop import _calls

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.two_gpus

SIZES = [40, 0, 77, 9]
ROWS, K, M = sum(SIZES) + 5, 24, 40
NAMES = (None, "native", "blas", "simt")

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    assert _calls._lent == {}, "a workspace was not given back"
    assert cupy.cuda.runtime.getDevice() == 0


def tensor(array: Any) -> torch.Tensor:
    with cupy.cuda.Device(array.device.id):
        return torch.from_numpy(cupy.asnumpy(array).copy())


class Arrays:
    """Operands on a device, their values, and a kernel that keeps a stream of it busy."""

    def __init__(self, device: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device = device
        shapes = {"x": (ROWS, K), "w": (len(SIZES), K, M), "gy": (ROWS, M)}
        self.values = {
            n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()
        }
        with cupy.cuda.Device(device):
            self.spin = cupy.RawKernel(SPIN, "spin")
            self.spin((1,), (1,), (cupy.int64(1),))
            self.x, self.w, self.gy = (cupy.asarray(t.numpy()) for t in self.values.values())
            self.sizes = cupy.array(SIZES)
            cupy.cuda.Device().synchronize()

    def call(self, name: str | None, where: str = "device") -> tuple[Any, Any]:
        sizes = self.sizes if where == "device" else SIZES
        y = interop.grouped_mm(self.x, self.w, sizes, implementation=name)
        return y, interop.grouped_mm_wgrad(self.x, self.gy, sizes, implementation=name)

    def late(self) -> None:
        """The rows come on the current stream of the current device, which is that of the arrays."""
        ready = self.x.copy()
        self.x[...] = 0
        cupy.cuda.Device().synchronize()
        self.spin((1,), (1,), (cupy.int64(100_000_000),))
        self.x[...] = ready

    def check(self, y: Any, dw: Any) -> None:
        v = self.values
        expected = oracle.grouped_mm(v["x"], v["w"], SIZES)
        oracle.assert_close(tensor(y), expected, torch.float64, K, 16.0)
        expected = oracle.grouped_mm_wgrad(v["x"], v["gy"], SIZES)
        oracle.assert_close(tensor(dw), expected, torch.float64, max(SIZES), 16.0)


@pytest.mark.defence("stream")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["device", "host"])
def test_side_streams_of_both_devices(name: str | None, where: str) -> None:
    """Slow producers on each; the calls while the other device is current."""
    both = [Arrays(index, index) for index in range(2)]
    sides = []
    for arrays in both:
        arrays.check(*arrays.call(name, where))
        with cupy.cuda.Device(arrays.device):
            sides.append(cupy.cuda.Stream(non_blocking=True))
    found = []
    for arrays, side in zip(both, sides, strict=True):
        with cupy.cuda.Device(arrays.device), side:
            arrays.call(name, where)  # so that memory of the stream is at hand
            arrays.late()
            with cupy.cuda.Device(1 - arrays.device):
                found.append(arrays.call(name, where))
                assert cupy.cuda.runtime.getDevice() == 1 - arrays.device
    for arrays, side, (y, dw) in zip(both, sides, found, strict=True):
        side.synchronize()
        assert y.device.id == dw.device.id == arrays.device
        arrays.check(y, dw)


def test_arrays_of_two_devices_are_refused() -> None:
    first, second = Arrays(0), Arrays(1)
    mm, wgrad = interop.grouped_mm, interop.grouped_mm_wgrad
    with cupy.cuda.Device(1):
        out = cupy.empty((ROWS, M))
    for call, text in (
        (lambda: mm(second.x, first.w, SIZES), "w must be on the device of x, cuda:1, got cuda:0"),
        (lambda: mm(first.x, second.w, SIZES), "w must be on the device of x, cuda:0, got cuda:1"),
        (lambda: mm(second.x, second.w, first.sizes), "group_sizes must be on the device of x, cuda:1, or"),
        (lambda: wgrad(second.x, first.gy, SIZES), "gy must be on the device of x, cuda:1, got cuda:0"),
        (lambda: mm(first.x, first.w, SIZES, out=out), "out must be on the device of x, cuda:0, got cuda:1"),
    ):
        with pytest.raises(errors.DeviceError, match=text):
            call()
        assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.defence("stream")
def test_eight_threads_on_both_devices() -> None:
    both = [Arrays(index, index) for index in range(2)]
    right = {(index, name): both[index].call(name) for index in range(2) for name in NAMES}
    for (index, _), outputs in right.items():
        both[index].check(*outputs)
    barrier, failures = threading.Barrier(8), []

    def run(thread: int) -> None:
        try:
            mine = Arrays(thread % 2, thread % 2)
            with cupy.cuda.Device(mine.device), cupy.cuda.Stream(non_blocking=True) as side:
                barrier.wait(60)
                for turn in range(6):
                    for name in NAMES:
                        mine.late()
                        with cupy.cuda.Device((thread + turn) % 2):
                            outputs = mine.call(name)
                        side.synchronize()
                        same = zip(outputs, right[mine.device, name], strict=True)
                        if not all(bool((a == b).all()) for a, b in same):
                            failures.append((thread, turn, name))
        except BaseException as error:
            failures.append((thread, repr(error)))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.blas
@pytest.mark.defence("pool-key")
def test_handles_of_arrays_are_of_their_device() -> None:
    for _ in range(2):
        for index in range(2):
            arrays = Arrays(index)
            arrays.check(*arrays.call("blas"))
    handles = two_kit.handles()
    assert {h["device"] for h in handles} == {0, 1}
    assert all(h["made_on"] == h["device"] and h["idle"] for h in handles), handles
