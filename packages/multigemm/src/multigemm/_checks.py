"""Checks of a call, made from metadata alone.

They run before any launch, in eager mode and in the operators' fake kernels, so a bad call gives the
same sentence under fake tensors and ``torch.compile``. Values of the group sizes are not looked at:
that would synchronise with the device (see ``_groups.check_values``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _rules
from ._errors import DeviceError, DTypeError, ShapeError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPE_NAMES = _rules.DTYPE_NAMES


def _tensor(op: str, name: str, value: object, dims: tuple[int, ...], layout: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise DTypeError(f"{op}: {name} must be a torch.Tensor {layout}, got {type(value).__name__}.")
    if value.dim() not in dims:
        _rules.dims(op, name, value.shape, dims, layout)


def _autocast_dtype(t: torch.Tensor) -> torch.dtype:
    """The dtype that the operand will have once autocast, if it is on, has acted on it."""
    kind = t.device.type
    if t.dtype == torch.float64 or t.dtype not in DTYPES:
        return t.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return t.dtype


def _same_device(op: str, x: torch.Tensor, name: str, other: torch.Tensor) -> None:
    if other.device != x.device:
        raise DeviceError(
            f"{op}: {name} must be on the device of x, {x.device}, got {other.device}; "
            f"move it with {name}.to(x.device)."
        )


def _dtypes(op: str, x: torch.Tensor, name: str, other: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        raise DTypeError(f"{op}: x must be {_DTYPE_NAMES}, got {_name(x.dtype)}.")
    if other.dtype != x.dtype and _autocast_dtype(other) != _autocast_dtype(x):
        raise DTypeError(
            f"{op}: {name} must have the dtype of x, {_name(x.dtype)}, got {_name(other.dtype)}; "
            f"convert one of them."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _options(op: str, out_dtype: torch.dtype | None, precision: str | None, implementation: object) -> None:
    if out_dtype is not None and out_dtype not in DTYPES:
        raise DTypeError(f"{op}: out_dtype must be {_DTYPE_NAMES}, got {_name(out_dtype)}.")
    _rules.options(op, precision, implementation)


def groups_argument(
    op: str,
    group_sizes: torch.Tensor | Sequence[int] | None,
    offsets: torch.Tensor | Sequence[int] | None,
) -> tuple[torch.Tensor, bool]:
    """The one given of ``group_sizes`` and ``offsets`` as a tensor, and whether it is ``offsets``."""
    value, is_offsets = _rules.one_of(op, group_sizes, offsets)
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (list, tuple)) or not all(isinstance(n, int) for n in value):
            raise DTypeError(
                f"{op}: {_rules.groups_name(is_offsets)} must be a 1-D int32 or int64 tensor or a list of "
                f"integers, got {type(value).__name__}."
            )
        value = torch.tensor(value, dtype=torch.int64)
    return value, is_offsets


def groups(op: str, x: torch.Tensor, value: torch.Tensor, offsets: bool) -> None:
    name = _rules.groups_name(offsets)
    if value.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{op}: {name} must be int32 or int64, got {_name(value.dtype)}.")
    if value.dim() != 1:
        raise ShapeError(f"{op}: {name} must have shape [G], got {_rules.show(value.shape)}.")
    if value.device != x.device and value.device.type not in ("cpu", "meta"):
        raise DeviceError(
            f"{op}: {name} must be on the device of x, {x.device}, or on the CPU, got {value.device}."
        )


def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    value: torch.Tensor,
    offsets: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
    implementation: str | None,
) -> None:
    op = "grouped_mm"
    _tensor(op, "x", x, (2, 3), _rules.X_LAYOUT)
    _tensor(op, "w", w, (3, 4), _rules.W_LAYOUT)
    x_shape, w_shape = x.shape, w.shape  # each of these makes an object
    _rules.w_fits_x(op, x_shape, w_shape)
    _same_device(op, x, "w", w)
    _dtypes(op, x, "w", w)
    groups(op, x, value, offsets)
    _rules.grouped_mm(op, x_shape, w_shape, value.shape[0], offsets)
    if bias is not None:
        _tensor(op, "bias", bias, (x.dim(),), _rules.bias_layout(x_shape))
        _same_device(op, x, "bias", bias)
        _dtypes(op, x, "bias", bias)
        _rules.bias(op, x_shape, w_shape, bias.shape)
    _options(op, out_dtype, precision, implementation)


def grouped_mm_wgrad(
    x: torch.Tensor,
    gy: torch.Tensor,
    value: torch.Tensor,
    offsets: bool,
    out_dtype: torch.dtype | None,
    precision: str | None,
    implementation: str | None,
) -> None:
    op = "grouped_mm_wgrad"
    _tensor(op, "x", x, (2, 3), _rules.X_LAYOUT)
    _tensor(op, "gy", gy, (2, 3), _rules.GY_LAYOUT)
    _same_device(op, x, "gy", gy)
    _dtypes(op, x, "gy", gy)
    groups(op, x, value, offsets)
    _rules.wgrad(op, x.shape, gy.shape)
    _options(op, out_dtype, precision, implementation)


def output(
    op: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor, *inputs: torch.Tensor | None
) -> None:
    """``out=``: right shape and device, no element twice, no memory shared with an operand."""
    if not isinstance(out, torch.Tensor):
        raise DTypeError(f"{op}: out must be a torch.Tensor, got {type(out).__name__}.")
    if out.dtype not in DTYPES:
        raise DTypeError(f"{op}: out must be {_DTYPE_NAMES}, got {_name(out.dtype)}.")
    if tuple(out.shape) != shape:
        raise ShapeError(f"{op}: out must have shape {_rules.show(shape)}, got {_rules.show(out.shape)}.")
    _same_device(op, like, "out", out)
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ShapeError(f"{op}: out must not be an expanded tensor (stride 0), got strides {out.stride()}.")
    for operand in inputs:
        if operand is not None and _overlap(out, operand):
            raise ShapeError(f"{op}: out must not share memory with an operand.")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0 or a.device.type == "meta" or torch.compiler.is_compiling():
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    spans = []
    for t in (a, b):
        first = t.storage_offset() * t.element_size()
        last = first + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) * t.element_size()
        spans.append((first, last + t.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
