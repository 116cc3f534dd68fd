"""Every error that the package raises on purpose.

There are three kinds, so that a caller can guard the whole kind with a builtin class:

- a bad call: also a ``ValueError`` or a ``TypeError``;
- no usable backend: also an ``ImportError`` (a guard written as ``except ImportError`` keeps working);
- a native failure: also a ``RuntimeError``, with the status, device, stream and shapes as fields.

All of them are a ``MultigemmError``. The texts say what was given, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "AbiSkew",
    "Ambiguous",
    "BackendError",
    "BrokenMetadata",
    "DTypeError",
    "DeviceError",
    "DriverTooOld",
    "FlavourMismatch",
    "GroupSizesError",
    "LibraryMissing",
    "MultigemmError",
    "NativeError",
    "NoKernelForArch",
    "NotInstalled",
    "OptionError",
    "ShapeError",
    "SymbolMissing",
    "VersionSkew",
]


class MultigemmError(Exception):
    """Base of every error raised on purpose by multigemm."""


# --- a bad call -----------------------------------------------------------------------------------


class ShapeError(MultigemmError, ValueError):
    """A dimension or a rank does not fit the other operands."""


class DeviceError(MultigemmError, ValueError):
    """The operands are not all on one device."""


class DTypeError(MultigemmError, TypeError):
    """A dtype is not supported, or the operands' dtypes differ."""


class GroupSizesError(MultigemmError, ValueError):
    """The group sizes or offsets are of the wrong kind, or (with MULTIGEMM_CHECK=1) have wrong values."""


class OptionError(MultigemmError, ValueError):
    """An option (implementation, precision, environment variable) has a value that is not known."""


# --- no usable backend ----------------------------------------------------------------------------


class BackendError(MultigemmError, ImportError):
    """No backend can serve this device type.

    Fields: ``device_type`` (``"cpu"``, ``"cuda"`` ...), ``backend`` (the name of the backend that the
    error is about, or None) and ``steps`` (everything that was tried, in order, one line each).
    """

    def __init__(
        self,
        message: str = "",
        *,
        device_type: str | None = None,
        backend: str | None = None,
        steps: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.device_type = device_type
        self.backend = backend
        self.steps: tuple[str, ...] = tuple(steps)


class NotInstalled(BackendError):
    """No backend for this device type is installed."""


class Ambiguous(BackendError):
    """One backend name is installed in two folders, or several backends fit equally well."""


class FlavourMismatch(BackendError):
    """The installed backends are built for another CUDA or ROCm major, or another PyTorch."""


class VersionSkew(BackendError):
    """The backend's version is not the front's."""


class AbiSkew(BackendError):
    """The backend's ABI or protocol number is not the front's."""


class LibraryMissing(BackendError):
    """The backend's library, or one that it needs, cannot be loaded, or is older than its floor."""


class SymbolMissing(BackendError):
    """The backend was loaded but lacks a function that the front needs."""


class BrokenMetadata(BackendError):
    """The backend's installed files cannot be read, or contradict each other."""


class DriverTooOld(BackendError):
    """The GPU driver is older than the backend's toolkit needs."""


class NoKernelForArch(BackendError):
    """The backend holds no code for this GPU's architecture."""


# --- a native failure -----------------------------------------------------------------------------


class NativeError(MultigemmError, RuntimeError):
    """A kernel, BLAS or runtime call failed.

    Fields: ``status`` (the status name, e.g. ``"MG_STATUS_BLAS"``), ``device`` (``"cuda:1"``),
    ``stream`` (the stream's handle as an integer, None on the CPU) and ``shapes`` (operand name ->
    shape). The message holds them all.
    """

    def __init__(
        self,
        message: str,
        *,
        status: str | None = None,
        device: str | None = None,
        stream: int | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.status = status
        self.device = device
        self.stream = stream
        self.shapes: dict[str, tuple[int, ...]] = dict(shapes or {})
        known: list[str] = []
        if status is not None:
            known.append(f"status {status}")
        if device is not None:
            known.append(f"device {device}")
        if stream is not None:
            known.append(f"stream {stream:#x}")
        known.extend(f"{name}{list(shape)}" for name, shape in self.shapes.items())
        super().__init__(f"{message} ({', '.join(known)})" if known else message)


# Statuses that say which backend error it is: the call would be right on another machine.
_BACKEND_STATUSES: dict[str, type[BackendError]] = {
    "MG_NO_DEVICE_CODE": NoKernelForArch,
    "MG_DRIVER_TOO_OLD": DriverTooOld,
}


def native_failure(
    op: str,
    text: str,
    *,
    device: str,
    stream: int | None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> BackendError | NativeError:
    """The error of a failed call, from the backend's ``"STATUS: cause"``."""
    status, _, cause = text.partition(": ")
    kind = _BACKEND_STATUSES.get(status)
    if kind is None:
        return NativeError(f"{op}: {text}", status=status, device=device, stream=stream, shapes=shapes)
    return kind(
        f"{op} on {device}: {cause}. implementation='reference' computes the product by PyTorch's own.",
        device_type=device.partition(":")[0],
        steps=(text,),
    )
