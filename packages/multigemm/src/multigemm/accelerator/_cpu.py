from __future__ import annotations

import torch

from .. import _dispatch
from ._base import Accelerator


class CPUAccelerator(Accelerator):
    """The host: one device, no streams; its capability is torch's name of the vector instructions."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self) -> None:
        return None

    def capability(self) -> str:
        return torch.backends.cpu.get_cpu_capability()

    def get_property(self, key: str) -> str | None:
        """ "multigemm_moe" for "multi_gemm_moe" where a backend serves the CPU."""
        if key == "multi_gemm_moe" and _dispatch.backend_for("cpu") is not None:
            return "multigemm_moe"
        return super().get_property(key)
