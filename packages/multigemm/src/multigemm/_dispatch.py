"""Device type -> backend: decided and opened on first need, remembered per device type.

The second stop of a call of ``grouped_mm``; the third is the backend's loader, such as multigemm_cpu.

A failure is remembered as well, as a value with every step that was tried, so that the second call shows
the same cause as the first. Nothing of ``torch.cuda`` is touched: the tensors that make us look have
initialised their device already, and CPU calls must not.

Importing this module loads none of the modules that scan, decide and open; the first call does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from typing import TYPE_CHECKING

from ._backend import Backend
from ._errors import BackendError

if TYPE_CHECKING:
    from ._resolution import Answer, Finding
    from ._selection import Torch

__all__ = ["Backend", "backend_for", "findings", "forget", "report"]

_lock = threading.RLock()
# Both are written under the lock and read without it: one dict operation is atomic.
_opened: dict[str, Backend | None] = {}  # the fast path: device types that raise nothing
_answers: dict[str, Answer] = {}


def backend_for(device_type: str) -> Backend | None:
    """Return the backend for tensors on ``device_type`` (``"cpu"``, ``"cuda"``, ``"mps"`` ...).

    None means that the torch reference is the answer. The first call for a device type scans, decides and
    opens; later calls look into a dict. Environment variables are read by that first call only.

    Raises a subclass of `BackendError` (an ``ImportError``) when a GPU tensor has no fitting backend and
    ``MULTIGEMM_FALLBACK=torch`` is not set. Never raises for ``"cpu"``: an installed CPU backend that is
    refused costs one ``RuntimeWarning`` and the reference answers.
    """
    if device_type in _opened:
        return _opened[device_type]
    return _first(device_type)


def _first(device_type: str) -> Backend | None:
    answer = _answers.get(device_type)
    fresh = False
    if answer is None:
        import torch  # noqa: F401  # before the lock: an import takes locks of its own

        from . import _resolution

        with _lock:
            answer = _answers.get(device_type)
            if answer is None:
                answer, fresh = _resolution.resolve(device_type), True
                _answers[device_type] = answer
                if answer.refusal is None:
                    _opened[device_type] = answer.backend
    error = answer.error()
    if error is not None:
        raise error
    if fresh and answer.warning is not None:
        warnings.warn(answer.warning, RuntimeWarning, stacklevel=3)
    return answer.backend


def backend_for_arrays(device_type: str, host: Torch) -> Backend:
    """Return the backend for arrays that another library than PyTorch brings; ``host`` describes it.

    Chosen by that library's CUDA major and opened without PyTorch where the backend can be. Raises a
    subclass of `BackendError` where none fits: there is no reference for such arrays.
    """
    key = f"{device_type} arrays of {host}"
    backend = _opened.get(key)
    if backend is not None:
        return backend
    answer = _answers.get(key)
    if answer is None:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401  # before the lock, as below; the backend may do without it

        from . import _resolution

        with _lock:
            answer = _answers.get(key)
            if answer is None:
                answer = _answers[key] = _resolution.resolve_arrays(device_type, host)
                if answer.backend is not None:
                    _opened[key] = answer.backend
    error = answer.error()
    if error is not None:
        raise error
    if answer.backend is None:
        raise BackendError(answer.text, device_type=device_type)
    return answer.backend


def report(device_type: str) -> tuple[str, tuple[str, ...]]:
    """Return why the backend of a device type is what it is, and every step taken; resolves if needed.

    For ``explain`` and ``doctor``. Does not raise for a missing backend: its text is the answer.
    """
    with contextlib.suppress(BackendError):
        backend_for(device_type)
    answer = _answers[device_type]
    return answer.text, answer.steps


def findings() -> list[Finding]:
    """Return every installed backend with its verdict; opens nothing and imports no PyTorch."""
    from . import _resolution

    return _resolution.findings(_answers)


def forget() -> None:
    """Drop every remembered answer, for tests. A library that was opened stays in the process."""
    with _lock:
        _opened.clear()
        _answers.clear()


def _after_fork_in_child() -> None:
    # The thread that held the lock does not exist in the child.
    global _lock
    _lock = threading.RLock()
    if _answers:
        from . import _resolution

        for device_type, answer in list(_answers.items()):
            _answers[device_type] = _resolution.forked(answer)
            if _answers[device_type].refusal is not None:
                _opened.pop(device_type, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
