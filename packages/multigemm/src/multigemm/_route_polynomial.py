"""From a call of ``indexed_polynomial`` to the code that computes it: a backend's kernel or the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _choice, _dispatch
from ._errors import BackendError, NativeError
from .accelerator import get_accelerator

OPERATOR = "indexed_polynomial"
_KERNELS = ("native", "simt")
_SERVED = ("", *_KERNELS)
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_has_kernel: dict[str, bool] = {}


def at_once(device: torch.device, name: str) -> str | None:
    """The kernel's name, "" for a backend's own choice, of nearly every call; None says nothing: ask on."""
    kernel = name or _choice.environment() or get_accelerator(device).get_property(OPERATOR) or ""
    kind = device.type
    if kernel not in _SERVED or not _has_kernel.get(kind, False):
        return None
    try:
        return kernel if _dispatch.backend_for(kind) is not None else None
    except BackendError:  # whoever asks on hears it, in the words of that place
        return None


def implementation(device: torch.device, name: str) -> Callable[..., None] | None:
    """The native function, or None for the reference. "torch" and "blas" name no kernel of this operator."""
    kernel = at_once(device, name)
    if kernel is None:
        choice = _choice.resolve(name, "", OPERATOR, device)
        if choice.name == "reference" or not served(device):
            if choice.name in _KERNELS:
                raise _choice.no_backend(OPERATOR, choice.name, device.type)
            return None
        kernel = choice.name if choice.name in _KERNELS else ""
    return functools.partial(launch, kernel, device)


@functools.cache
def _leaf() -> Callable[..., None]:
    found = torch.ops.multigemm.native_weighted_polynomial.default
    return getattr(found, "_op", found)  # what it calls, with a frame of Python less


def launch(kernel: str, device: torch.device, *arguments: Any) -> None:
    """Call a backend's kernel: the arguments of ``native_weighted_polynomial``, but for the last one."""
    try:
        _leaf()(*arguments, kernel)
    except RuntimeError as error:
        text = str(error)
        if "failed with MG_" not in text:
            raise
        told = text[text.index("MG_") :]
        status = told.partition(":")[0]
        raise NativeError(
            f"{OPERATOR}: {told.splitlines()[0]}", status=status, device=str(device), stream=None
        ) from error


def served(device: torch.device) -> bool:
    """Whether a backend has the kernels for a device; opens it. Raises where a GPU has no fitting backend."""
    kind = device.type
    if kind not in _KEYS or _dispatch.backend_for(kind) is None:
        return False
    if kind not in _has_kernel:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        _has_kernel[kind] = has("multigemm::native_weighted_polynomial", _KEYS[kind])
    return _has_kernel[kind]


def why_not(device: torch.device) -> str:
    """Why no kernel serves the device; "" where one does."""
    try:
        if served(device):
            return ""
    except BackendError as error:
        return str(error).splitlines()[0]
    return f"no backend has the kernel for {device.type!r} here"
