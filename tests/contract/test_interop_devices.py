"""What device arrays need around a call: the arrays' device, its current stream, memory of the pool.

The failure: a product on the current device or the default stream where the arrays have others, and
workspaces that outlive the call. A stand-in for CuPy keeps its arrays in host memory, so that the CPU's
kernels compute; the real one is tested on a GPU (tests/gpu/test_cupy.py).
https://github.com/pytorch/pytorch/pull/24947 https://github.com/dmlc/xgboost/issues/6753
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from multigemm import _abi, _dispatch, errors, interop
from multigemm.interop import _calls

np = pytest.importorskip("numpy", reason="NumPy is not installed")

SIZES = [3, 0, 4]


class Array(np.ndarray):
    """Host memory that says it is on a device."""

    device = SimpleNamespace(id=1)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class OnOtherDevice(Array):
    device = SimpleNamespace(id=0)


class Device:
    current = 0

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.index

    def __exit__(self, *error: object) -> None:
        Device.current = self.before


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in is installed; what a call was told, and the memory that it was lent."""
    pytest.importorskip("multigemm_cpu", reason="multigemm-cpu is not installed")
    found = SimpleNamespace(problems=[], hosts=[], lent=[], memory=True)

    def alloc(size: int) -> Any:
        if not found.memory:
            raise MemoryError
        room = np.empty(size + 64, np.uint8)
        memory = SimpleNamespace(ptr=room.ctypes.data + -room.ctypes.data % 64, room=room)
        found.lent.append((Device.current, size))
        return memory

    fake = ModuleType("cupy")
    fake.__version__ = "14.2.0"
    fake.ndarray = Array
    fake.empty = lambda shape, dtype: np.empty(shape, dtype).view(Array)
    fake.asarray = lambda value: np.asarray(value.array).view(Array)
    fake.from_dlpack = lambda value: np.from_dlpack(value.array).view(Array)
    fake.cuda = SimpleNamespace(
        Device=Device,
        get_current_stream=lambda: SimpleNamespace(ptr=0x100 + Device.current),
        alloc=alloc,
        runtime=SimpleNamespace(runtimeGetVersion=lambda: 13020, is_hip=False),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    numpy_host = _calls._library(_calls._arrays.Operand(np.zeros(1), _calls.CPU))
    cpu = _dispatch.backend_for_arrays("cpu", numpy_host)

    def backend_for_arrays(device_type: str, host: Any) -> Any:
        found.hosts.append((device_type, str(host)))
        return cpu

    def call(self: _abi.Library, problem: Any) -> int:
        found.problems.append((problem.device, problem.stream, problem.groups.flags, Device.current))
        return real(self, problem)

    real = _abi.Library.call
    monkeypatch.setattr(_dispatch, "backend_for_arrays", backend_for_arrays)
    monkeypatch.setattr(_abi.Library, "call", call)
    monkeypatch.setattr(_calls, "_hosts", {})
    yield found
    assert Device.current == 0, "the current device is not what it was"
    assert _calls._lent == {}, "memory was not given back"


def on_device(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).view(Array)


def test_device_and_stream_are_the_arrays(seen: SimpleNamespace) -> None:
    x, w = on_device(9, 5), on_device(3, 5, 7)
    y = interop.grouped_mm(x, w, np.array(SIZES).view(Array))
    assert isinstance(y, Array)
    assert np.array_equal(y, interop.grouped_mm(np.asarray(x), np.asarray(w), SIZES))
    dw = interop.grouped_mm_wgrad(x, y, SIZES)
    assert isinstance(dw, Array)
    on_gpu, _, with_sizes_on_the_host = seen.problems
    assert on_gpu == (1, 0x101, 0, 1)
    assert with_sizes_on_the_host == (1, 0x101, _abi.GROUPS_ON_HOST, 1)
    assert seen.hosts[0] == ("cuda", "CuPy 14.2.0 (CUDA 13.2)")


def test_workspace_is_of_the_pool_and_given_back(seen: SimpleNamespace) -> None:
    x, w = on_device(40, 3, 16), on_device(2, 3, 16, 32).swapaxes(-1, -2).copy().swapaxes(-1, -2)
    interop.grouped_mm(x, w, [15, 25])
    assert seen.lent and {device for device, _ in seen.lent} == {1}
    seen.memory = False
    with pytest.raises(errors.NativeError) as caught:
        interop.grouped_mm(x, w, [15, 25])
    assert (caught.value.status, caught.value.device) == ("MG_OUT_OF_MEMORY", "cuda:1")
    assert caught.value.stream == 0x101 and caught.value.shapes["x"] == (40, 3, 16)


def test_arrays_of_two_devices_are_refused(seen: SimpleNamespace) -> None:
    x, w = on_device(9, 5), on_device(3, 5, 7)
    with pytest.raises(errors.DeviceError, match="w must be on the device of x, cuda:1, got cuda:0"):
        interop.grouped_mm(x, w.view(OnOtherDevice), SIZES)
    with pytest.raises(errors.DeviceError, match="w must be on the device of x, cuda:1, got cpu"):
        interop.grouped_mm(x, np.asarray(w), SIZES)
    sizes = np.array(SIZES)
    with pytest.raises(
        errors.DeviceError, match="must be on the device of x, cuda:1, or on the CPU, got cuda:0"
    ):
        interop.grouped_mm(x, w, sizes.view(OnOtherDevice))
    with pytest.raises(
        errors.DeviceError, match="must be on the device of x, cpu, or on the CPU, got cuda:1"
    ):
        interop.grouped_mm(np.asarray(x), np.asarray(w), sizes.view(Array))
    assert seen.problems == []


class ByInterface:
    def __init__(self, array: Any) -> None:
        self.array, self.__cuda_array_interface__ = np.asarray(array), {"version": 3}


class ByDLPack:
    def __init__(self, array: Any, device: tuple[int, int] = (2, 1), dtype: str = "float64") -> None:
        self.array, self.device, self.dtype = np.asarray(array), device, dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("foreign", [ByInterface, ByDLPack])
def test_foreign_device_arrays(seen: SimpleNamespace, foreign: Any) -> None:
    x, w, out = on_device(9, 5), on_device(3, 5, 7), np.full((9, 7), np.nan)
    target = foreign(out)
    assert interop.grouped_mm(foreign(x), foreign(w), SIZES, out=target) is target
    assert np.array_equal(out, interop.grouped_mm(np.asarray(x), np.asarray(w), SIZES))
    assert isinstance(interop.grouped_mm(foreign(x), foreign(w), SIZES), Array)


def test_foreign_arrays_that_cannot_be_read(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = on_device(9, 5), on_device(3, 5, 7)
    with pytest.raises(errors.DTypeError, match="its device has DLPack's type 8; known are the CPU, CUDA"):
        interop.grouped_mm(ByDLPack(x, (8, 0)), w, SIZES)
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "13.6.0")
    with pytest.raises(errors.DTypeError, match=r"CuPy 13\.6\.0 has no bfloat16; CuPy 14 has it"):
        interop.grouped_mm(ByDLPack(x, dtype="torch.bfloat16"), w, SIZES)
