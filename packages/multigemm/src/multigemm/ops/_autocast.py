"""Autocast: the operands are converted as those of ``torch.mm`` are, to the device's autocast dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rule(op: Callable[..., torch.Tensor], device_type: str, key: str) -> Callable[..., torch.Tensor]:
    """The kernel of ``op`` for the dispatch key ``key``; float64 and integers are left alone."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(value: Any, dtype: torch.dtype, kind: str) -> Any:
        # Group sizes on the CPU bring the CPU's autocast to a call whose operands are on another device.
        eligible = (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype != torch.float64
            and value.device.type == kind
        )
        return value.to(dtype) if eligible else value

    def kernel(*arguments: Any) -> torch.Tensor:
        # An out-of-tree device may be given its name after this import, so it is asked for at each call.
        kind = torch._C._get_privateuse1_backend_name() if device_type == "privateuseone" else device_type
        dtype = torch.get_autocast_dtype(kind)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*(cast(a, dtype, kind) for a in arguments))

    return kernel
