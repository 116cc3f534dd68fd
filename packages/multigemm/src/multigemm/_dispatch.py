"""Device type -> backend: decided and opened on first need, remembered per device type.

A failure is remembered as well, as a value with every step that was tried, so that the second call shows
the same cause as the first. Nothing of ``torch.cuda`` is touched: the tensors that make us look have
initialised their device already, and CPU calls must not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from dataclasses import dataclass

from . import _discovery, _opening
from ._errors import BackendError
from ._opening import Backend
from ._selection import Candidate, Decision, Failure, Flavour, Front, Torch, Verdict, select

__all__ = ["Backend", "Finding", "backend_for", "findings", "forget", "report"]

ABI = 1


@dataclass(frozen=True)
class Finding:
    """One installed backend, for ``multigemm doctor``.

    ``verdict`` is ``"opened"``, ``"accepted"`` (fits, not needed yet), ``"refused"`` (by its metadata) or
    ``"failed"`` (accepted, but opening went wrong); ``steps`` is what opening did, in order.
    """

    backend: str
    kind: str
    folder: str
    version: str
    verdict: str
    reason: str
    opened: bool
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Refusal:
    """A device type that no backend serves: enough to raise the same error again."""

    failure: Failure
    text: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class _Report:
    """What became of a device type: the whole text, its one cause, and the steps of opening."""

    text: str
    cause: str
    steps: tuple[str, ...] = ()


class _Missing:
    """Marks a device type that was never asked for; None is an answer (the reference)."""


_MISSING = _Missing()
_lock = threading.RLock()
# The three tables are written under the lock and read without it: a dict lookup is atomic.
_answers: dict[str, Backend | None] = {}
_refusals: dict[str, _Refusal] = {}
_reports: dict[str, _Report] = {}


def backend_for(device_type: str) -> Backend | None:
    """Return the backend for tensors on ``device_type`` (``"cpu"``, ``"cuda"``, ``"mps"`` ...).

    None means that the torch reference is the answer. The first call for a device type scans, decides and
    opens; later calls look into a dict. Environment variables are read by that first call only.

    Raises a subclass of `BackendError` (an ``ImportError``) when a GPU tensor has no fitting backend and
    ``MULTIGEMM_FALLBACK=torch`` is not set. Never raises for ``"cpu"``: an installed CPU backend that is
    refused costs one ``RuntimeWarning`` and the reference answers.
    """
    answer = _answers.get(device_type, _MISSING)
    if not isinstance(answer, _Missing):
        return answer
    warning: str | None = None
    refusal = _refusals.get(device_type)
    if refusal is None:
        import torch  # noqa: F401  # before the lock: an import takes locks of its own

        with _lock:
            if device_type not in _answers and device_type not in _refusals:
                warning = _resolve(device_type)
            answer, refusal = _answers.get(device_type), _refusals.get(device_type)
    if refusal is not None:
        failure = refusal.failure
        # A new object each time: an exception that is raised twice gathers the tracebacks of both.
        raise failure.error(
            refusal.text, device_type=device_type, backend=failure.backend, steps=refusal.steps
        )
    if warning is not None:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return None if isinstance(answer, _Missing) else answer


def report(device_type: str) -> tuple[str, tuple[str, ...]]:
    """Return why the backend of a device type is what it is, and every step taken; resolves if needed.

    For ``explain`` and ``doctor``. Does not raise for a missing backend: its text is the answer.
    """
    with contextlib.suppress(BackendError):
        backend_for(device_type)
    known = _reports[device_type]
    return known.text, known.steps


def findings() -> list[Finding]:
    """Return every installed backend with its verdict; opens nothing and imports no PyTorch."""
    candidates = _discovery.installed()
    torch = _discovery.torch_facts()
    if torch is None:
        reason = "PyTorch is not installed"
        return [Finding(c.name, c.kind, c.place, c.version, "refused", reason, False) for c in candidates]
    cpu, gpu = (_decide(device, torch, candidates).verdicts for device in ("cpu", "cuda"))
    return [
        _finding(on_cpu if candidate.kind == "cpu" else on_gpu, "cpu" if candidate.kind == "cpu" else "cuda")
        for candidate, on_cpu, on_gpu in zip(candidates, cpu, gpu, strict=True)
    ]


def _finding(verdict: Verdict, device_type: str) -> Finding:
    candidate, known = verdict.candidate, _reports.get(device_type)
    backend = _answers.get(device_type)
    word, reason, steps = "refused", verdict.reason, known.steps if known else ()
    opened = backend is not None and backend.folder == candidate.folder
    if backend is not None and opened:
        off = [f"{feature} is off: {why}" for feature, why in backend.disabled.items()]
        word, reason = "opened", "; ".join(["fits and is open", *off])
    elif verdict.accepted and known is not None and steps:
        word, reason = "failed", known.cause
    else:
        word, steps = "accepted" if verdict.accepted else "refused", ()
    return Finding(
        candidate.name, candidate.kind, candidate.place, candidate.version, word, reason, opened, steps
    )


def forget() -> None:
    """Drop every remembered answer, for tests. A library that was opened stays in the process."""
    with _lock:
        _answers.clear()
        _refusals.clear()
        _reports.clear()


# --- the first call -------------------------------------------------------------------------------


def _front() -> Front:
    return Front(_discovery.front_version(), _discovery.PROTOCOL, ABI)


def _decide(device_type: str, torch: Torch, candidates: tuple[Candidate, ...]) -> Decision:
    return select(
        device_type,
        torch,
        candidates,
        _front(),
        backend=os.environ.get("MULTIGEMM_BACKEND"),
        fallback=os.environ.get("MULTIGEMM_FALLBACK"),
    )


def _resolve(device_type: str) -> str | None:
    """Find the answer for a device type and remember it; return a warning to show. Holds the lock."""
    if device_type not in ("cpu", "cuda"):
        # No backend exists for other devices, so not even a scan is due.
        _reports[device_type] = _plain(f"no backend exists for {device_type!r}; the reference answers")
        _answers[device_type] = None
        return None
    # A PyTorch of unreadable version fails every floor, which is told as any other refusal.
    torch = _discovery.torch_facts() or Torch("of unknown version", (), Flavour("cpu"))
    decision = _decide(device_type, torch, _discovery.installed())
    steps: list[str] = []
    failure = decision.failure
    if decision.chosen is not None:
        try:
            backend = _opening.open_backend(decision.chosen, _front(), steps)
        except _opening.OpeningError as error:
            failure = error.failure
        else:
            _reports[device_type] = _plain(f"backend {backend.name} {backend.version} is open", tuple(steps))
            _answers[device_type] = backend
            return _joined(decision.notes)
    if failure is None:
        _reports[device_type] = _plain(f"no backend for {device_type!r} is installed; the reference answers")
        _answers[device_type] = None
        return _joined(decision.notes)
    text = explain_failure(decision, failure, torch, _front(), tuple(steps))
    _reports[device_type] = _Report(text, failure.cause, tuple(steps))
    if decision.on_failure == "raise":
        _refusals[device_type] = _Refusal(failure, text, tuple(steps))
        return None
    _answers[device_type] = None
    return text if decision.on_failure == "warn" else None


def _plain(text: str, steps: tuple[str, ...] = ()) -> _Report:
    return _Report(text, text, steps)


def _joined(notes: tuple[str, ...]) -> str | None:
    return "multigemm: " + "; ".join(notes) if notes else None


def explain_failure(
    decision: Decision, failure: Failure, torch: Torch, front: Front, steps: tuple[str, ...] = ()
) -> str:
    """Write the text of an error or a warning: asked, found, cause, cure. A pure function."""
    raises = decision.on_failure == "raise"
    head = f"multigemm: no usable backend for {decision.device_type!r} tensors"
    lines = [head if raises else f"{head}, the slower torch reference is used instead"]
    lines.append(f"  with: multigemm {front.version}, {torch}")
    if not decision.verdicts:
        lines.append("  found: no backend is installed")
    for verdict in decision.verdicts:
        candidate = verdict.candidate
        state = f"refused: {verdict.reason}"
        if verdict.accepted:
            state = "could not be opened" if candidate is decision.chosen else "fits"
        lines.append(f"  found: {candidate.name} {candidate.version} in {candidate.place}: {state}")
    lines.extend(f"  tried: {step}" for step in steps)
    lines.extend(f"  note: {note}" for note in decision.notes)
    lines.append(f"  cause: {failure.cause}")
    lines.append(f"  fix: {failure.cure}")
    if raises:
        lines.append("  or set MULTIGEMM_FALLBACK=torch to take the slower torch reference on this device")
    lines.append("  `multigemm doctor` shows the whole picture")
    return "\n".join(lines)


# --- fork -----------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    """Give the child a lock of its own, and tell that an opened GPU backend is of no use there.

    The thread that held the lock does not exist in the child. A CPU backend works on: it keeps no state
    of a thread. A GPU driver does not survive a fork, whatever library reaches it.
    """
    global _lock
    _lock = threading.RLock()
    for device_type, backend in list(_answers.items()):
        if backend is not None and backend.kind != "cpu":
            cause = f"this process was forked after backend {backend.name} had been opened"
            cure = "start workers with the 'spawn' or 'forkserver' method of multiprocessing"
            text = (
                f"multigemm: no usable backend for {device_type!r} tensors\n  cause: {cause}\n  fix: {cure}"
            )
            _refusals[device_type] = _Refusal(Failure(BackendError, cause, cure, backend.name), text, ())
            _reports[device_type] = _Report(text, cause)
            del _answers[device_type]


if hasattr(os, "register_at_fork") and sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork_in_child)
