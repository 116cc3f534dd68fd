"""Device type -> accelerator: built in, registered by hand, or brought by an installed package."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .. import _plugins
from .._errors import OptionError
from ._base import Accelerator
from ._cpu import CPUAccelerator
from ._cuda import CUDAAccelerator, ROCmAccelerator

GROUP = "multigemm.accelerators"

Factory = Callable[[torch.device], Accelerator]

_lock = threading.RLock()
_registered: dict[str, Factory] = {}
_cache: dict[torch.device, Accelerator] = {}


def register_accelerator(device_type: str, factory: Factory, *, replace: bool = False) -> None:
    """Let ``factory(device)`` make the accelerator of ``device_type`` ("cpu", "cuda", "npu" ...).

    A registration by hand wins over an installed package's, and that over the built-in one. Raises
    ``OptionError`` where the type was registered by hand before, unless ``replace``.
    """
    if not callable(factory):
        raise OptionError(f"register_accelerator: factory must be callable, got {factory!r}.")
    with _lock:
        if device_type in _registered and not replace:
            raise OptionError(
                f"register_accelerator: {device_type!r} is registered already; "
                "pass replace=True to replace it."
            )
        _registered[device_type] = factory
        _cache.clear()


def get_accelerator(device: torch.device | torch.Tensor | str | int | None = None) -> Accelerator:
    """The accelerator of a device.

    ``device`` is a ``torch.device``, a string such as "cuda:1", an index of the current accelerator
    type, a tensor (its device), or ``None``: torch's current accelerator, the CPU where there is none.
    """
    if type(device) is torch.device:
        known = _cache.get(device)
        if known is not None:
            return known
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    elif isinstance(device, torch.Tensor):
        device = device.device
    elif not isinstance(device, torch.device):
        device = torch.device(device)
    found = _cache.get(device)
    if found is None:
        with _lock:
            found = _cache[device] = _factory(device.type)(device)
    return found


def _factory(device_type: str) -> Factory:
    if device_type in _registered:
        return _registered[device_type]
    if device_type in _plugins.names(GROUP):
        factory: Factory = _plugins.load(GROUP, device_type)
        return factory
    if device_type == "cpu":
        return CPUAccelerator
    if device_type == "cuda":
        return ROCmAccelerator if torch.version.hip else CUDAAccelerator
    return Accelerator
