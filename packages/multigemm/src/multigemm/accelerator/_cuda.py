"""NVIDIA and AMD devices, which torch serves under one device type, "cuda"."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from .. import _dispatch
from .._errors import BackendError
from ._base import Accelerator


def has_code(architectures: Iterable[str], capability: object) -> bool:
    """Whether one of a backend's ``architectures`` runs on a device of that capability.

    "sm_80" is machine code for 8.0 and later of major 8, "sm_90a" for 9.0 alone, "compute_120" is PTX for
    12.0 and later; any other name ("gfx942") has to equal the capability.
    """
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if found is None:
            if name == capability:
                return True
        elif isinstance(capability, tuple):
            kind, version, suffix = found[1], (int(found[2]), int(found[3])), found[4]
            if capability == version:
                return True
            if not suffix and capability > version and (kind == "compute" or capability[0] == version[0]):
                return True
    return False


class CUDAAccelerator(Accelerator):
    """NVIDIA: the capability is (major, minor), (9, 0) for Hopper."""

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> torch.device:
        if self.device_count() == 0:
            return torch.device("cuda")
        return torch.device("cuda", torch.cuda.current_device())

    def current_stream(self) -> torch.Stream | None:
        if self.device_count() == 0:
            return None
        return torch.cuda.current_stream(self.device)

    def capability(self) -> object | None:
        if self.device_count() == 0:
            return None
        return torch.cuda.get_device_capability(self.device)

    def get_property(self, key: str) -> str | None:
        """The native layer for "multi_gemm_moe", where the installed backend has code for this device."""
        if key != "multi_gemm_moe":
            return super().get_property(key)
        capability = self.capability()
        if capability is None:
            return None
        try:
            backend = _dispatch.backend_for(self.device.type)
        except BackendError:
            return None
        if backend is None or not has_code(backend.info["architectures"], capability):
            return None
        return "multigemm_native_moe"


class ROCmAccelerator(CUDAAccelerator):
    """AMD: torch's device type is "cuda" too; the capability is the architecture, such as "gfx942"."""

    @property
    def name(self) -> str:
        return "rocm"

    def capability(self) -> object | None:
        if self.device_count() == 0:
            return None
        architecture: str = torch.cuda.get_device_properties(self.device).gcnArchName
        return architecture.split(":")[0]  # what follows are feature flags such as sramecc+
