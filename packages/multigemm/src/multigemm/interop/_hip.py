"""AMD devices and their arrays through hip-python, which need not be installed; it needs no PyTorch, no CuPy.

hip-python opens the HIP runtime at the first call of a function, and raises ``RuntimeError`` where there is
none. Its arrays are contiguous memory with ``__cuda_array_interface__``; it knows no current stream, no pool
and no owner of memory.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .._errors import BackendError, NativeError

# Names and codes of a typestr, as NumPy has them; "=" and "<" mean the same on every machine with an AMD GPU.
_CODES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "d": "float64",
    "f": "float32",
    "e": "float16",
    "i8": "int64",
    "i4": "int32",
    "l": "int64",
    "q": "int64",
    "i": "int32",
}
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "int64": 8, "int32": 4}


@dataclass(frozen=True)
class HipDevice:
    """An AMD GPU as hip-python tells it; ``architecture`` is such as "gfx942"."""

    index: int
    name: str
    architecture: str
    memory: int


@dataclass(frozen=True)
class DType:
    """The part of a NumPy dtype that `Operand` reads."""

    name: str

    def __str__(self) -> str:
        return self.name


class View:
    """A device array as `Operand` wants one: an address, a shape, strides in bytes, a dtype, a device."""

    def __init__(self, value: Any, index: int | None = None) -> None:
        found = value.__cuda_array_interface__
        if found.get("mask") is not None:
            raise TypeError("it has a mask")
        self.value = value
        self.shape = tuple(int(size) for size in found["shape"])
        self.dtype = DType(dtype_of(found["typestr"]))
        self.itemsize = _BYTES.get(self.dtype.name, 1)
        pointer, read_only = found["data"]
        self.data = SimpleNamespace(ptr=int(pointer or 0))
        self.flags = SimpleNamespace(writeable=not read_only)
        strides = found.get("strides")
        self.strides = tuple(strides) if strides is not None else contiguous(self.shape, self.itemsize)
        self.stream = stream_of(found.get("stream"))
        self.device = SimpleNamespace(id=device_of(value, self) if index is None else index)

    def copy(self, order: str) -> View:
        raise BackendError(
            "multigemm.interop: hip-python cannot copy an array whose strides or address are no whole number "
            "of elements, or negative; make it contiguous first.",
            device_type="cuda",
        )

    def tolist(self) -> list[int]:
        """The numbers of a vector of integers, which lie on the device: waits for its stream."""
        hip = module()
        if self.strides != contiguous(self.shape, self.itemsize):
            self.copy("C")
        host = array("q" if self.itemsize == 8 else "i", bytes(self.itemsize * self.shape[0]))
        if host:
            with on(self.device.id):
                check("hipStreamSynchronize", hip.hipStreamSynchronize(self.stream or None))
                kind = hip.hipMemcpyKind.hipMemcpyDeviceToHost
                check("hipMemcpy", hip.hipMemcpy(host, self.value, len(host) * host.itemsize, kind))
        return host.tolist()


def module() -> Any:
    """hip-python's module of HIP's functions."""
    try:
        from hip import hip
    except ImportError as error:
        raise BackendError(
            f"multigemm.interop: this device array needs hip-python, which cannot be imported ({error}): "
            "python -m pip install hip-python",
            device_type="cuda",
        ) from error
    return hip


def check(name: str, answer: Any) -> Any:
    """What a function of HIP returned beside its status, which has to be success."""
    status, *rest = answer
    if int(status) != 0:
        text = f"{getattr(status, 'name', 'error')} ({int(status)})"
        raise NativeError(
            f"multigemm.interop: {name} failed: {text}", status="MG_DEVICE_ERROR", device="cuda"
        )
    return rest[0] if rest else None


def count() -> int:
    """How many AMD devices hip-python sees: 0 where it, a HIP runtime or a device is missing."""
    try:
        status, devices = module().hipGetDeviceCount()
    except (ImportError, RuntimeError):  # RuntimeError: there is no libamdhip64
        return 0
    return int(devices) if int(status) == 0 else 0


def hip_devices() -> list[HipDevice]:
    """The AMD devices of this machine, without PyTorch; an empty list where hip-python finds none."""
    found = []
    for index in range(count()):
        properties = module().hipDeviceProp_t()
        check("hipGetDeviceProperties", module().hipGetDeviceProperties(properties, index))
        architecture = _text(properties.gcnArchName).partition(":")[
            0
        ]  # what follows are flags such as xnack-
        memory = int(properties.totalGlobalMem)
        found.append(HipDevice(index, _text(properties.name), architecture, memory))
    return found


def version() -> tuple[str, tuple[int, int]]:
    """hip-python's own version, and the major and minor of the HIP runtime."""
    number = int(check("hipRuntimeGetVersion", module().hipRuntimeGetVersion()))
    import hip

    own = str(getattr(hip, "HIP_PYTHON_VERSION", None) or getattr(hip, "__version__", "0"))
    return own, (number // 10_000_000, number // 100_000 % 100)  # 7 02 12345: major, minor, patch


def is_hips(value: Any) -> bool:
    """Whether an array is of hip-python, whose package was renamed in version 10; imports nothing."""
    return re.match(r"(hip|rocm\.bindings)(\.|$)", type(value).__module__) is not None


def dtype_of(typestr: str) -> str:
    """``float32`` of "<f4", "float32" or "f"; of anything else the text itself, which no product takes."""
    plain = typestr.lstrip("=<|")
    return _CODES.get(plain, plain)


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of an array whose last dimension is the fastest."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def stream_of(value: Any) -> int:
    """A stream of the interface as HIP's handle: none and 1 are the default stream, whose handle is 0."""
    return 0 if value in (None, 0, 1) else int(value)


def device_of(value: Any, view: View) -> int:
    """The device whose memory it is, which the interface does not tell; the current one if there is none."""
    hip = module()
    if not view.data.ptr or 0 in view.shape:
        return int(check("hipGetDevice", hip.hipGetDevice()))
    attributes = hip.hipPointerAttribute_t()
    check("hipPointerGetAttributes", hip.hipPointerGetAttributes(attributes, value))
    return int(attributes.device)


@contextlib.contextmanager
def on(index: int) -> Iterator[None]:
    """Make a device current, and the caller's again at the end."""
    hip = module()
    before = int(check("hipGetDevice", hip.hipGetDevice()))
    check("hipSetDevice", hip.hipSetDevice(index))
    try:
        yield
    finally:
        check("hipSetDevice", hip.hipSetDevice(before))


def empty(shape: Sequence[int], dtype: Any, index: int) -> View:
    """Uninitialised memory of ``hip.hipMalloc``: its owner gives it to ``hip.hipFree``."""
    name = dtype_of(str(getattr(dtype, "name", dtype)))
    size = _BYTES[name]
    for length in shape:
        size *= length
    memory = check("hipMalloc", module().hipMalloc(max(size, 1)))
    return View(memory.configure(_force=True, typestr=name, shape=tuple(int(n) for n in shape)), index)


def join(views: Sequence[View]) -> int:
    """One stream on which all of these are ready: the one they name; the host waits for any other."""
    named = list(dict.fromkeys(view.stream for view in views if view.stream))
    for other in named[1:]:
        check("hipStreamSynchronize", module().hipStreamSynchronize(other))
    return named[0] if named else 0


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
