"""NVIDIA and AMD devices, which torch serves under one device type, "cuda"."""

from __future__ import annotations

import torch

from ._base import Accelerator


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
