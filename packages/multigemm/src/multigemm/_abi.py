"""The C ABI of the native backends (shared/include/multigemm/abi.h) for ctypes.

PyTorch's tensors reach the kernels through the registered operators; this mirror serves everything else:
arrays of other frameworks, and the backend's own description. Letters: N rows, G groups, B batch, K inner
and M outer width; strides count elements.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

from ._errors import native_failure

ABI = 1

OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, DEVICE_ERROR, INTERNAL = range(6)
NO_DEVICE_CODE, DRIVER_TOO_OLD = 6, 7
STATUS_NAMES = (
    "MG_OK",
    "MG_INVALID_ARGUMENT",
    "MG_UNSUPPORTED",
    "MG_OUT_OF_MEMORY",
    "MG_DEVICE_ERROR",
    "MG_INTERNAL",
    "MG_NO_DEVICE_CODE",
    "MG_DRIVER_TOO_OLD",
)
DTYPES = {"float64": 1, "float32": 2, "float16": 3, "bfloat16": 4, "int32": 5, "int64": 6}
PRECISIONS = {"": 0, "ieee": 1, "tf32": 2}
IMPLEMENTATIONS = {"": 0, "native": 1, "blas": 2, "torch": 3, "simt": 4}
GROUPS_OFFSETS, GROUPS_ON_HOST = 1, 2


class Groups(ctypes.Structure):
    """``mg_groups``: G sizes, or G cumulative ends."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    ]


class Matmul(ctypes.Structure):
    """``mg_matmul``: one batched product, as a host's ``matmul`` callback gets it."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("a", ctypes.c_void_p),
        ("a_stride", ctypes.c_int64 * 3),
        ("b", ctypes.c_void_p),
        ("b_stride", ctypes.c_int64 * 3),
        ("c", ctypes.c_void_p),
        ("c_stride", ctypes.c_int64 * 3),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


RangeFunction = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
ParallelFor = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    RangeFunction,
    ctypes.c_void_p,
)
Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
HostMatmul = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(Matmul))


class Host(ctypes.Structure):
    """``mg_host``: what the caller lends for one call; every callback may be null."""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ParallelFor),
        ("allocate", Allocate),
        ("release", Release),
        ("matmul", HostMatmul),
    ]


class GroupedMM(ctypes.Structure):
    """``mg_grouped_mm_problem``."""

    _fields_ = [
        ("struct_size", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64 * 3),
        ("w", ctypes.c_void_p),
        ("w_stride", ctypes.c_int64 * 4),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64 * 3),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64 * 3),
        ("groups", Groups),
        ("dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("implementation", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("host", ctypes.POINTER(Host)),
    ]


class GroupedMMWgrad(ctypes.Structure):
    """``mg_grouped_mm_wgrad_problem``."""

    _fields_ = [
        ("struct_size", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64 * 3),
        ("gy", ctypes.c_void_p),
        ("gy_stride", ctypes.c_int64 * 3),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64 * 4),
        ("groups", Groups),
        ("dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("implementation", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("sum_batch", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("host", ctypes.POINTER(Host)),
    ]


# In the order in which mg_abi_sizes reports them.
STRUCTS: tuple[type[ctypes.Structure], ...] = (Groups, Matmul, Host, GroupedMM, GroupedMMWgrad)


class Library:
    """The C functions of one opened backend; ``suffix`` is the backend's name (``"cpu"``, ``"cu13"`` ...)."""

    def __init__(self, handle: ctypes.CDLL, suffix: str) -> None:
        self._query = self._function(handle, f"mg_query_{suffix}", ctypes.c_char_p)
        self._last_error = self._function(handle, f"mg_last_error_{suffix}", ctypes.c_char_p)
        self._sizes = self._function(
            handle, f"mg_abi_sizes_{suffix}", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
        )
        explain = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._call = {
            GroupedMM: self._function(handle, f"mg_grouped_mm_{suffix}", ctypes.c_int32, ctypes.c_void_p),
            GroupedMMWgrad: self._function(
                handle, f"mg_grouped_mm_wgrad_{suffix}", ctypes.c_int32, ctypes.c_void_p
            ),
        }
        self._explain = {
            GroupedMM: self._function(handle, f"mg_grouped_mm_explain_{suffix}", *explain),
            GroupedMMWgrad: self._function(handle, f"mg_grouped_mm_wgrad_explain_{suffix}", *explain),
        }

    @staticmethod
    def _function(handle: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(handle, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    def query(self) -> dict[str, Any]:
        """What the library says about itself."""
        answer: dict[str, Any] = json.loads(self._query())
        return answer

    def last_error(self) -> str:
        """The message of this thread's last failure: ``"STATUS_NAME: text"``."""
        return str(self._last_error().decode("utf-8", "replace"))

    def struct_sizes(self) -> tuple[int, ...]:
        """The sizes of `STRUCTS` as the library was compiled with them, in bytes."""
        room = (ctypes.c_int64 * 16)()
        count = int(self._sizes(room, len(room)))
        return tuple(room[:count])

    def call(self, problem: GroupedMM | GroupedMMWgrad) -> int:
        """Run a problem; returns the status, whose text `last_error` then has."""
        return int(self._call[type(problem)](ctypes.byref(problem)))

    def explain(self, problem: GroupedMM | GroupedMMWgrad) -> dict[str, Any] | None:
        """Which kernel a problem takes and why not the others; None if it is refused (see `last_error`)."""
        length = ctypes.c_int64()
        function = self._explain[type(problem)]
        if function(ctypes.byref(problem), None, 0, ctypes.byref(length)) != OK:
            return None
        text = ctypes.create_string_buffer(length.value + 1)
        if function(ctypes.byref(problem), text, len(text), ctypes.byref(length)) != OK:
            return None
        answer: dict[str, Any] = json.loads(text.value)
        return answer


def _strides(tensor: Any, names: str, *, shared: bool = False) -> list[int]:
    """Strides in the order of ``names``; an absent B, or (``shared``) one of size 1, has stride 0."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    at = names.index("B")
    if len(sizes) < len(names):
        strides.insert(at, 0)
    elif shared and sizes[at] == 1:
        strides[at] = 0
    return strides


def _groups(groups: Any, is_offsets: bool, x: Any) -> Groups:
    dtype = DTYPES[str(groups.dtype).removeprefix("torch.")]
    flags = GROUPS_OFFSETS if is_offsets else 0
    if groups.device.type == "cpu" and x.device.type != "cpu":
        flags |= GROUPS_ON_HOST
    return Groups(groups.data_ptr(), groups.shape[0], groups.stride(0), dtype, flags)


def grouped_mm_problem(
    x: Any,
    w: Any,
    groups: Any,
    is_offsets: bool,
    bias: Any,
    out: Any,
    precision: str = "",
    implementation: str = "",
    stream: int | None = None,
) -> GroupedMM:
    """The problem of tensors x [N, (B,) K], w [G, (B,) K, M], bias [G, (B,) M] or None, out [N, (B,) M].

    ``stream`` is a stream's handle; None is PyTorch's current stream on the device of x. The caller keeps
    the tensors alive as long as the problem is used.
    """
    p = GroupedMM(struct_size=ctypes.sizeof(GroupedMM))
    p.rows, p.batch, p.inner = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    p.outer = w.shape[-1]
    p.x, p.w, p.out = x.data_ptr(), w.data_ptr(), out.data_ptr()
    p.x_stride[:] = _strides(x, "NBK")
    p.w_stride[:] = _strides(w, "GBKM", shared=True)
    p.out_stride[:] = _strides(out, "NBM")
    if bias is not None:
        p.bias = bias.data_ptr()
        p.bias_stride[:] = _strides(bias, "GBM", shared=True)
    p.groups = _groups(groups, is_offsets, x)
    _finish(p, x, out, precision, implementation, stream)
    return p


def grouped_mm_wgrad_problem(
    x: Any,
    gy: Any,
    groups: Any,
    is_offsets: bool,
    sum_batch: bool,
    out: Any,
    precision: str = "",
    implementation: str = "",
    stream: int | None = None,
) -> GroupedMMWgrad:
    """The problem of tensors x [N, (B,) K], gy [N, (B,) M], out [G, (B or 1,) K, M].

    ``stream`` is a stream's handle; None is PyTorch's current stream on the device of x. The caller keeps
    the tensors alive as long as the problem is used.
    """
    p = GroupedMMWgrad(struct_size=ctypes.sizeof(GroupedMMWgrad), sum_batch=sum_batch)
    p.rows, p.batch, p.inner = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    p.outer = gy.shape[-1]
    p.x, p.gy, p.out = x.data_ptr(), gy.data_ptr(), out.data_ptr()
    p.x_stride[:] = _strides(x, "NBK")
    p.gy_stride[:] = _strides(gy, "NBM")
    p.out_stride[:] = _strides(out, "GBKM")
    p.groups = _groups(groups, is_offsets, x)
    _finish(p, x, out, precision, implementation, stream)
    return p


def _finish(p: Any, x: Any, out: Any, precision: str, implementation: str, stream: int | None) -> None:
    p.dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
    p.out_dtype = DTYPES[str(out.dtype).removeprefix("torch.")]
    p.precision, p.implementation = PRECISIONS[precision], IMPLEMENTATIONS[implementation]
    p.device = x.device.index or 0
    p.stream = _torch_stream(x.device) if stream is None else stream


def _torch_stream(device: Any) -> int | None:
    """The handle of PyTorch's current stream on a device; None where it has none (the CPU)."""
    if device.type == "cpu":
        return None
    from .accelerator import get_accelerator

    return getattr(get_accelerator(device).current_stream(), "cuda_stream", None)


def explain(
    backend: Any,
    op: str,
    x: Any,
    other: Any,
    groups: Any,
    is_offsets: bool,
    bias: Any,
    sum_batch: bool,
    out: Any,
    precision: str,
    implementation: str,
) -> dict[str, Any]:
    """What a backend would run: ``kernel`` and, by kernel, why the ``rejected`` ones are not taken.

    ``out`` only lends its shape, strides and dtype. Raises what the call would if the backend refuses it.
    """
    problem: GroupedMM | GroupedMMWgrad
    if op == "grouped_mm":
        problem = grouped_mm_problem(x, other, groups, is_offsets, bias, out, precision, implementation)
    else:
        problem = grouped_mm_wgrad_problem(
            x, other, groups, is_offsets, sum_batch, out, precision, implementation
        )
    # Nothing is written; only null would be refused.
    problem.out = problem.out or 64
    # As PyTorch's binding calls it, a product of the host's own can be had.
    host = Host(matmul=HostMatmul(lambda context, product: 1))
    problem.host = ctypes.pointer(host)
    library = Library(backend.handle, backend.name)
    plan = library.explain(problem)
    if plan is None:
        text = library.last_error()
        stream = None if x.device.type == "cpu" else problem.stream or 0
        raise native_failure(op, text, device=str(x.device), stream=stream)
    rejected = {other["kernel"]: other["why_not"] for other in plan["others"]}
    return {"kernel": plan["kernel"], "rejected": rejected, "notes": [plan["why"]]}
