"""Arrays of any library as the C ABI wants them: a pointer, sizes, strides in elements, a device.

Nothing here is imported before an array of that library comes: CuPy for the first device array, hip-python
for its own arrays and where there is no CuPy, NumPy for the first host array.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._errors import BackendError, DTypeError, ShapeError
from .._rules import DTYPE_NAMES
from . import _hip

FLOATS = ("float64", "float32", "float16", "bfloat16")

# Device types of DLPack: the host's memory, also pinned, and CUDA's or ROCm's, also managed.
_HOST, _DEVICE = (1, 3, 11), (2, 10, 13)


@dataclass(frozen=True)
class Device:
    """Named as PyTorch names it, so that texts agree: ``cpu`` or ``cuda:1``."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU = Device("cpu")


class Operand:
    """An array of NumPy, CuPy or hip-python with the few methods of a tensor that ``_abi`` calls."""

    def __init__(self, array: Any, device: Device) -> None:
        self.array, self.device = array, device
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = dtype_name(array.dtype)

    @property
    def result(self) -> Any:
        """The array as its library has it."""
        return self.array.value if isinstance(self.array, _hip.View) else self.array

    def dim(self) -> int:
        return len(self.shape)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data if self.device == CPU else self.array.data.ptr)

    def strides(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides() if dim is None else self.strides()[dim]

    def readable(self) -> Operand:
        """Itself, or a copy where an address or a stride is no whole number of elements, or negative."""
        return self if self.regular() else Operand(self.array.copy(order="C"), self.device)

    def regular(self) -> bool:
        size = self.array.itemsize
        return self.data_ptr() % size == 0 and all(s >= 0 and s % size == 0 for s in self.array.strides)

    def span(self) -> tuple[int, int]:
        """The first address and the one past the last; of an array that has elements."""
        reach = [(n - 1) * s for n, s in zip(self.shape, self.array.strides, strict=True)]
        first = self.data_ptr() + sum(r for r in reach if r < 0)
        return first, self.data_ptr() + sum(r for r in reach if r > 0) + int(self.array.itemsize)

    def overlaps(self, other: Operand) -> bool:
        if self.device != other.device or 0 in self.shape or 0 in other.shape:
            return False
        ours, theirs = self.span(), other.span()
        return ours[0] < theirs[1] and theirs[0] < ours[1]


def dtype_name(dtype: Any) -> str:
    """``float32``, ``bfloat16`` ...; of a foreign byte order the code that no product takes (``>f4``)."""
    return str(dtype.name if getattr(dtype, "isnative", True) else dtype.str)


def numpy() -> Any:
    try:
        import numpy as module
    except ImportError as error:
        raise BackendError(
            f"multigemm.interop: host arrays need NumPy, which cannot be imported ({error}): "
            "python -m pip install numpy",
            device_type="cpu",
        ) from error
    return module


def cupy() -> Any:
    try:
        import cupy as module
    except ImportError as error:
        raise BackendError(
            f"multigemm.interop: device arrays need CuPy, which cannot be imported ({error}): "
            "python -m pip install cupy-cuda13x (or cupy-cuda12x); on AMD GPUs hip-python serves too",
            device_type="cuda",
        ) from error
    return module


def adopt(op: str, name: str, value: Any, layout: str) -> Operand:
    """The operand that an array is, without a copy of its data. ``DTypeError`` for what is no array."""
    loaded = sys.modules.get("cupy")
    if loaded is not None and isinstance(value, loaded.ndarray):
        return _on_device(value)
    host = sys.modules.get("numpy")
    if host is not None and isinstance(value, host.ndarray):
        return Operand(value, CPU)
    if isinstance(value, type) or not (
        hasattr(value, "__dlpack_device__") or hasattr(value, "__cuda_array_interface__")
    ):
        raise DTypeError(
            f"{op}: {name} must be an array {layout} of CuPy or NumPy, or one that speaks "
            f"__cuda_array_interface__ or DLPack, got {type(value).__name__}."
        )
    try:
        return _foreign(value)
    except BackendError:
        raise
    except Exception as error:  # whatever the other library says of itself
        raise DTypeError(
            f"{op}: {name}, a {type(value).__module__}.{type(value).__name__}, cannot be read as an array: "
            f"{type(error).__name__}: {error}"
        ) from error


def _foreign(value: Any) -> Operand:
    interface = hasattr(value, "__cuda_array_interface__")
    if _hip.is_hips(value) or (interface and not _on_host(value) and _only_hip()):
        return _on_device(_hip.View(value))
    if not hasattr(value, "__dlpack_device__"):
        return _on_device(cupy().asarray(value))
    kind, index = value.__dlpack_device__()
    if kind in _HOST:
        return Operand(numpy().from_dlpack(value), CPU)
    if kind not in _DEVICE:
        raise TypeError(f"its device has DLPack's type {int(kind)}; known are the CPU, CUDA and ROCm")
    module = cupy()
    if "bfloat16" in str(getattr(value, "dtype", "")) and int(module.__version__.split(".")[0]) < 14:
        # Its reader of DLPack crashes on dtypes that it does not know.
        raise TypeError(f"CuPy {module.__version__} has no bfloat16; CuPy 14 has it, with ml_dtypes")
    with module.cuda.Device(index):
        return _on_device(module.from_dlpack(value))


def _on_host(value: Any) -> bool:
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _HOST


def _only_hip() -> bool:
    """Whether hip-python has to serve, because there is no CuPy, and can, because it sees a device."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None:
        return False
    return _hip.count() > 0


def _on_device(array: Any) -> Operand:
    return Operand(array, Device("cuda", int(array.device.id)))


def adopt_groups(op: str, name: str, value: Any) -> Operand:
    """Group sizes or offsets: an array as any other, or a list of integers, which lies on the host."""
    if isinstance(value, (list, tuple)):
        if not all(isinstance(n, int) for n in value):
            raise DTypeError(f"{op}: {name} must be an array of int32 or int64, or a list of integers.")
        return Operand(numpy().array(value, dtype="int64"), CPU)
    found = adopt(op, name, value, "[G]")
    if found.dtype not in ("int32", "int64"):
        raise DTypeError(f"{op}: {name} must be int32 or int64, got {found.dtype}.")
    if found.dim() != 1:
        raise ShapeError(f"{op}: {name} must have shape [G], got {list(found.shape)}.")
    return found


def dtype_of(op: str, dtype: Any) -> Any:
    """``out_dtype`` as a dtype: a name, a NumPy dtype or a scalar type."""
    module = numpy()
    if str(dtype) == "bfloat16":
        try:
            ml_dtypes: Any = importlib.import_module("ml_dtypes")
        except ImportError as error:
            raise DTypeError(
                f"{op}: out_dtype bfloat16 needs ml_dtypes, since NumPy has no such dtype of its own: "
                "python -m pip install ml_dtypes"
            ) from error
        return module.dtype(ml_dtypes.bfloat16)
    try:
        found = module.dtype(dtype)
    except TypeError:
        raise DTypeError(f"{op}: out_dtype must be {DTYPE_NAMES}, got {dtype!r}.") from None
    if dtype_name(found) not in FLOATS:
        raise DTypeError(f"{op}: out_dtype must be {DTYPE_NAMES}, got {dtype_name(found)}.")
    return found


def empty(shape: Sequence[int], dtype: Any, like: Operand) -> Operand:
    """Uninitialised, of the library and on the device of ``like``; CuPy's of its pool and stream."""
    if isinstance(like.array, _hip.View):
        return Operand(_hip.empty(shape, dtype, like.array.device.id), like.device)
    module = numpy() if like.device == CPU else cupy()
    return Operand(module.empty(tuple(shape), dtype=dtype), like.device)
