"""The interface. It serves as it is for any device type that torch's generic accelerator API covers."""

from __future__ import annotations

import torch


class Accelerator:
    """One device type, or one device of it.

    Subclass it and register the subclass (``register_accelerator``, or an entry point of the group
    ``multigemm.accelerators`` named as the device type) to state what a device prefers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """The accelerator's name: that of torch's device type, unless a subclass knows better."""
        return self.device.type

    def device_count(self) -> int:
        """Number of devices of this type that are visible; 0 where torch was built without it."""
        if not self._is_current_type():
            return 0
        return torch.accelerator.device_count()

    def current_device(self) -> torch.device:
        """The device that torch uses for this type where none is named."""
        if not self._is_current_type():
            return torch.device(self.device.type)
        return torch.device(self.device.type, torch.accelerator.current_device_index())

    def current_stream(self) -> torch.Stream | None:
        """torch's current stream on this device; ``None`` where the device type has no streams."""
        if not self._is_current_type():
            return None
        return torch.accelerator.current_stream(self.device)

    def capability(self) -> object | None:
        """What the hardware can do, in the accelerator's own terms: opaque to everyone else.

        ``None`` where the device type has no such notion.
        """
        return None

    def get_property(self, key: str) -> str | None:
        """The name of the preferred implementation for ``key``, or ``None``: no preference.

        Keys in use: "grouped_mm", "grouped_mm_wgrad", and "multi_gemm_moe" of ``multigemm.moe``.
        """
        return None

    def _is_current_type(self) -> bool:
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self.device.type and torch.accelerator.is_available()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.device)!r})"
