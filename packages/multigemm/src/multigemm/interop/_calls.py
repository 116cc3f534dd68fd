"""``grouped_mm`` and ``grouped_mm_wgrad`` on arrays: checks, the device's stream, one call of the C ABI."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from .. import _abi, _choice, _dispatch, _groups, _rules
from .._errors import BackendError, DeviceError, DTypeError, OptionError, ShapeError, native_failure
from .._selection import Flavour, Torch
from .._versions import parse_version
from . import _arrays, _hip
from ._arrays import CPU, Operand

IMPLEMENTATIONS = ("", *_choice.NATIVE)


def grouped_mm(
    x: Any,
    w: Any,
    group_sizes: Any = None,
    *,
    offsets: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Multiply each row block of ``x`` by its group's matrix: ``y[n] = x[n] @ w[g(n)] + bias[g(n)]``.

    The arguments are those of ``multigemm.grouped_mm``, as arrays on one device: CuPy's, hip-python's or
    NumPy's, or any that speak ``__cuda_array_interface__`` or DLPack. ``group_sizes`` (or ``offsets``) may
    be on the host beside device arrays, or a list. ``out_dtype`` is a dtype or its name. float32 is
    multiplied in full unless ``precision="tf32"``. ``implementation`` is "native", "blas" or "simt"; by
    default the pin of ``multigemm.use``, then ``MULTIGEMM_IMPLEMENTATION``, then the backend's own choice.

    Returns ``out`` where it is given, else a CuPy array, or a NumPy array for host operands. For arrays of
    hip-python it is hip-python's, of ``hip.hipMalloc``: the caller gives it to ``hip.hipFree``. There is no
    derivative. Device work is queued on CuPy's current stream of the operands' device; for hip-python's
    arrays on the stream that they name, else on the default one. Nothing waits for it. Raises what
    ``multigemm.grouped_mm`` raises.
    """
    op = "grouped_mm"
    value, is_offsets = _rules.one_of(op, group_sizes, offsets)
    a = _arrays.adopt(op, "x", x, _rules.X_LAYOUT)
    _rules.dims(op, "x", a.shape, (2, 3), _rules.X_LAYOUT)
    b = _arrays.adopt(op, "w", w, _rules.W_LAYOUT)
    _rules.dims(op, "w", b.shape, (3, 4), _rules.W_LAYOUT)
    _rules.w_fits_x(op, a.shape, b.shape)
    _pair(op, a, "w", b)
    groups = _group_operand(op, a, value, is_offsets)
    _rules.grouped_mm(op, a.shape, b.shape, groups.shape[0], is_offsets)
    c = None
    if bias is not None:
        layout = _rules.bias_layout(a.shape)
        c = _arrays.adopt(op, "bias", bias, layout)
        _rules.dims(op, "bias", c.shape, (a.dim(),), layout)
        _pair(op, a, "bias", c)
        _rules.bias(op, a.shape, b.shape, c.shape)
    name = _implementation(op, precision, implementation)
    shape = (*a.shape[:-1], b.shape[-1])
    with _on(a, b, c, groups) as stream:
        y = _output(op, out, out_dtype, shape, a, (a, b, c, groups))
        _check_values(op, groups, is_offsets, a)
        a, b, groups = a.readable(), b.readable(), groups.readable()
        c = c.readable() if c is not None else None
        problem = _abi.grouped_mm_problem(
            a, b, groups, is_offsets, c, y, precision or "ieee", name, stream=stream
        )
        _call(op, problem, a, {"x": a, "w": b, "out": y})
    return y.result if out is None else out


def grouped_mm_wgrad(
    x: Any,
    gy: Any,
    group_sizes: Any = None,
    *,
    offsets: Any = None,
    sum_batch: bool = False,
    out_dtype: Any = None,
    out: Any = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Sum the outer products of each group's rows: ``dw[g] = sum over n in g of x[n]^T gy[n]``.

    The arguments are those of ``multigemm.grouped_mm_wgrad``; arrays, options and results are as
    ``multigemm.interop.grouped_mm`` has them.
    """
    op = "grouped_mm_wgrad"
    value, is_offsets = _rules.one_of(op, group_sizes, offsets)
    a = _arrays.adopt(op, "x", x, _rules.X_LAYOUT)
    _rules.dims(op, "x", a.shape, (2, 3), _rules.X_LAYOUT)
    b = _arrays.adopt(op, "gy", gy, _rules.GY_LAYOUT)
    _rules.dims(op, "gy", b.shape, (2, 3), _rules.GY_LAYOUT)
    _pair(op, a, "gy", b)
    groups = _group_operand(op, a, value, is_offsets)
    _rules.wgrad(op, a.shape, b.shape)
    if sum_batch:
        _rules.sum_batch(op, a.shape)
    name = _implementation(op, precision, implementation)
    batch = (1,) if sum_batch else a.shape[1:-1]
    shape = (groups.shape[0], *batch, a.shape[-1], b.shape[-1])
    with _on(a, b, groups) as stream:
        dw = _output(op, out, out_dtype, shape, a, (a, b, groups))
        _check_values(op, groups, is_offsets, a)
        a, b, groups = a.readable(), b.readable(), groups.readable()
        problem = _abi.grouped_mm_wgrad_problem(
            a, b, groups, is_offsets, sum_batch, dw, precision or "ieee", name, stream=stream
        )
        _call(op, problem, a, {"x": a, "gy": b, "out": dw})
    return dw.result if out is None else out


# --- checks ---------------------------------------------------------------------------------------


def _same_device(op: str, x: Operand, name: str, other: Operand) -> None:
    if other.device != x.device:
        raise DeviceError(
            f"{op}: {name} must be on the device of x, {x.device}, got {other.device}; copy it there."
        )


def _pair(op: str, x: Operand, name: str, other: Operand) -> None:
    """Device and dtype of an operand beside x."""
    _same_device(op, x, name, other)
    if x.dtype not in _arrays.FLOATS:
        raise DTypeError(f"{op}: x must be {_rules.DTYPE_NAMES}, got {x.dtype}.")
    if other.dtype != x.dtype:
        raise DTypeError(
            f"{op}: {name} must have the dtype of x, {x.dtype}, got {other.dtype}; convert one of them."
        )


def _group_operand(op: str, x: Operand, value: Any, is_offsets: bool) -> Operand:
    name = _rules.groups_name(is_offsets)
    groups = _arrays.adopt_groups(op, name, value)
    if groups.device not in (x.device, CPU):
        raise DeviceError(
            f"{op}: {name} must be on the device of x, {x.device}, or on the CPU, got {groups.device}."
        )
    return groups


def _implementation(op: str, precision: str | None, implementation: str | None) -> str:
    _rules.options(op, precision, implementation)
    name = implementation or _choice.pinned() or _choice.environment()
    if name not in IMPLEMENTATIONS:
        raise OptionError(
            f"{op}: for arrays there is no implementation {name!r}; there are: {', '.join(_choice.NATIVE)}."
        )
    return name


def _output(
    op: str, out: Any, out_dtype: Any, shape: tuple[int, ...], x: Operand, inputs: tuple[Operand | None, ...]
) -> Operand:
    """``out`` as it was given and may be written, or a new one; on the operands' device."""
    if out is None:
        return _arrays.empty(shape, x.array.dtype if out_dtype is None else _dtype(op, out_dtype), x)
    y = _arrays.adopt(op, "out", out, _rules.show(shape))
    if y.dtype not in _arrays.FLOATS:
        raise DTypeError(f"{op}: out must be {_rules.DTYPE_NAMES}, got {y.dtype}.")
    if out_dtype is not None and _arrays.dtype_name(_dtype(op, out_dtype)) != y.dtype:
        raise OptionError(f"{op}: out has dtype {y.dtype} but out_dtype is {out_dtype}; give one of them.")
    if y.shape != shape:
        raise ShapeError(f"{op}: out must have shape {_rules.show(shape)}, got {_rules.show(y.shape)}.")
    _same_device(op, x, "out", y)
    if any(stride == 0 and size > 1 for size, stride in zip(y.shape, y.strides(), strict=True)):
        raise ShapeError(f"{op}: out must not be an expanded array (stride 0), got strides {y.strides()}.")
    if not y.regular():
        raise ShapeError(
            f"{op}: out must have whole elements for strides, none of them negative, "
            f"got strides of {y.array.strides} bytes at address {y.data_ptr():#x}."
        )
    if not getattr(getattr(y.array, "flags", None), "writeable", True):
        raise OptionError(f"{op}: out is read-only.")
    if any(operand is not None and y.overlaps(operand) for operand in inputs):
        raise ShapeError(f"{op}: out must not share memory with an operand.")
    return y


def _dtype(op: str, dtype: Any) -> Any:
    return _arrays.dtype_of(op, dtype)


def _check_values(op: str, groups: Operand, is_offsets: bool, x: Operand) -> None:
    if _groups.check_enabled():
        _groups.check_values(op, groups.array, is_offsets, x.shape[0])


# --- the device and the call ----------------------------------------------------------------------


@contextlib.contextmanager
def _on(x: Operand, *others: Operand | None) -> Any:
    """Make the operands' device current and lend its stream's handle; the CPU has none."""
    if x.device == CPU:
        yield None
        return
    if isinstance(x.array, _hip.View):
        arrays = [o.array for o in (x, *others) if o is not None]
        with _hip.on(x.array.device.id):
            yield _hip.join([array for array in arrays if isinstance(array, _hip.View)])
        return
    module = _arrays.cupy()
    with module.cuda.Device(x.device.index):
        yield int(module.cuda.get_current_stream().ptr)


def _call(op: str, problem: Any, x: Operand, operands: dict[str, Operand]) -> None:
    backend = _dispatch.backend_for_arrays(x.device.type, _library(x))
    library = _libraries.get(backend.folder)
    if library is None:
        library = _libraries[backend.folder] = _abi.Library(backend.handle, backend.name)
    if x.device != CPU and not isinstance(x.array, _hip.View):  # HIP's own pool serves without one
        problem.host = ctypes.pointer(_pool_host())
    status = library.call(problem)
    if status != _abi.OK:
        raise native_failure(
            op,
            library.last_error(),
            device=str(x.device),
            stream=None if x.device == CPU else problem.stream or 0,
            shapes={name: operand.shape for name, operand in operands.items()},
        )


_libraries: dict[str, _abi.Library] = {}
_hosts: dict[str, Torch] = {}


def _library(x: Operand) -> Torch:
    """The library that brings the arrays, as the choice of a backend wants to know it."""
    key = "hip" if isinstance(x.array, _hip.View) else x.device.type
    found = _hosts.get(key)
    if found is None:
        found = _hosts[key] = _describe(x)
    return found


def _describe(x: Operand) -> Torch:
    if x.device == CPU:
        text = str(_arrays.numpy().__version__)
        return Torch(text, parse_version(text), Flavour("cpu"), "NumPy")
    if isinstance(x.array, _hip.View):
        text, runtime_version = _hip.version()
        return Torch(text, parse_version(text), Flavour("rocm", runtime_version), "hip-python")
    module = _arrays.cupy()
    text = str(module.__version__)
    runtime = module.cuda.runtime
    number = int(runtime.runtimeGetVersion())
    if runtime.is_hip:  # 7 02 12345: major, minor, patch
        flavour = Flavour("rocm", (number // 10_000_000, number // 100_000 % 100))
    else:  # 13 00 0: major, minor
        flavour = Flavour("cuda", (number // 1000, number // 10 % 100))
    if flavour.version[0] == 0:
        raise BackendError(f"multigemm.interop: CuPy {text} tells no version of its toolkit: {number}.")
    return Torch(text, parse_version(text), flavour, "CuPy")


_lent: dict[int, Any] = {}


def _allocate(context: int | None, size: int) -> int | None:
    """Workspace from CuPy's pool, on the current device and stream; null where there is none."""
    try:
        memory = _arrays.cupy().cuda.alloc(size)
        _lent[memory.ptr] = memory
        return int(memory.ptr)
    except BaseException:  # nothing may pass through C; the library reports that it got no memory
        return None


def _release(context: int | None, memory: int | None) -> None:
    if memory is not None:
        _lent.pop(memory, None)


_pool: list[_abi.Host] = []


def _pool_host() -> _abi.Host:
    """What is lent to each call on a device: the callbacks hold no state of a call."""
    if not _pool:
        _pool.append(_abi.Host(threads=1, allocate=_abi.Allocate(_allocate), release=_abi.Release(_release)))
    return _pool[0]
