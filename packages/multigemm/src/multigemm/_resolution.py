"""The first call for a device type: scan, decide, open, and put the outcome into words.

`_dispatch` imports this module on first need and remembers what it returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from . import _discovery, _opening
from ._backend import Backend
from ._errors import BackendError, NotInstalled
from ._selection import Candidate, Decision, Failure, Flavour, Front, Torch, Verdict, pip_install, select

ABI = 1


@dataclass(frozen=True)
class Answer:
    """What became of a device type.

    ``backend`` serves it, or is None: then the reference does, or, where ``refusal`` is set, nothing does
    and each call raises. ``warning`` is shown once. ``text`` tells the whole story, ``cause`` its point,
    ``steps`` what opening did, in order.
    """

    device_type: str
    backend: Backend | None
    text: str
    cause: str
    steps: tuple[str, ...] = ()
    refusal: Failure | None = None
    warning: str | None = None

    def error(self) -> BackendError | None:
        """Return a new error each time: one that is raised twice gathers the tracebacks of both."""
        if self.refusal is None:
            return None
        return self.refusal.error(
            self.text, device_type=self.device_type, backend=self.refusal.backend, steps=self.steps
        )


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

    @property
    def name(self) -> str:
        """The backend's name, as `Backend` calls it."""
        return self.backend


def resolve(device_type: str) -> Answer:
    """Find the answer for a device type; PyTorch is imported, the caller holds the lock."""
    if device_type not in ("cpu", "cuda"):
        # No backend exists for other devices, so not even a scan is due.
        return _reference(device_type, f"no backend exists for {device_type!r}; the reference answers")
    # A PyTorch of unreadable version fails every floor, which is told as any other refusal.
    torch = _discovery.torch_facts() or Torch("of unknown version", (), Flavour("cpu"))
    front = _front()
    decision = _decide(device_type, torch, _discovery.installed(), front)
    remarks = "multigemm: " + "; ".join(decision.notes) if decision.notes else None
    opened, failure, steps = _open(decision, front, _opening.open_backend, remarks)
    if opened is not None:
        return opened
    if failure is None:
        text = f"no backend for {device_type!r} is installed or wanted; the reference answers"
        return _reference(device_type, text, remarks)
    text = explain_failure(decision, failure, torch, front, steps)
    raises, warns = decision.on_failure == "raise", decision.on_failure == "warn"
    return Answer(
        device_type,
        None,
        text,
        failure.cause,
        steps,
        refusal=failure if raises else None,
        warning=text if warns else None,
    )


def resolve_arrays(device_type: str, host: Torch) -> Answer:
    """Find the answer for arrays of another library, which has no reference to fall back to.

    The backend is chosen by that library's own CUDA major; the caller holds the lock.
    """
    front = _front()
    decision = replace(_decide(device_type, host, _discovery.installed(), front), on_failure="refuse")
    opened, failure, steps = _open(decision, front, _opening.open_core)
    if opened is not None:
        return opened
    if failure is None:
        cause = f"no backend for {device_type!r} arrays is installed or wanted"
        failure = Failure(NotInstalled, cause, pip_install(f"multigemm[cpu]=={front.version}"))
    text = explain_failure(decision, failure, host, front, steps)
    return Answer(device_type, None, text, failure.cause, steps, refusal=failure)


def _open(
    decision: Decision,
    front: Front,
    opener: Callable[[Candidate, Front, list[str]], Backend],
    remarks: str | None = None,
) -> tuple[Answer | None, Failure | None, tuple[str, ...]]:
    """Open what was chosen, if anything was: the answer, or why there is none; and the steps taken."""
    steps: list[str] = []
    if decision.chosen is None:
        return None, decision.failure, ()
    try:
        backend = opener(decision.chosen, front, steps)
    except _opening.OpeningError as error:
        return None, error.failure, tuple(steps)
    text = f"backend {backend.name} {backend.version} is open"
    if lacking := _lacking(backend):
        text = f"{text}; {lacking}"
        remarks = f"multigemm: backend {backend.name}: {lacking}" + (f"\n{remarks}" if remarks else "")
    answer = Answer(decision.device_type, backend, text, text, tuple(steps), warning=remarks)
    return answer, None, answer.steps


def _lacking(backend: Backend) -> str:
    """What a backend that was built for tests of the tests says of itself; nothing of any other."""
    left_out = backend.query.get("without") or backend.info.get("without") or ()
    if not left_out:
        return ""
    return f"it was built without its {', '.join(left_out)}, for tests alone: results may be wrong"


def forked(answer: Answer) -> Answer:
    """Return what an answer becomes in a forked child.

    A CPU backend works on: it keeps no state of a thread. A GPU driver does not survive a fork, whatever
    library reaches it.
    """
    backend, device_type = answer.backend, answer.device_type
    if backend is None or backend.kind == "cpu":
        return answer
    cause = f"this process was forked after backend {backend.name} had been opened"
    cure = "start workers with the 'spawn' or 'forkserver' method of multiprocessing"
    text = f"multigemm: no usable backend for {device_type!r} tensors\n  cause: {cause}\n  fix: {cure}"
    return Answer(device_type, None, text, cause, refusal=Failure(BackendError, cause, cure, backend.name))


def findings(answers: Mapping[str, Answer]) -> list[Finding]:
    """Return every installed backend with its verdict; opens nothing and imports no PyTorch."""
    candidates = _discovery.installed()
    torch = _discovery.torch_facts()
    if torch is None:
        reason = "PyTorch is not installed"
        return [Finding(c.name, c.kind, c.place, c.version, "refused", reason, False) for c in candidates]
    found = []
    decisions = {device: _decide(device, torch, candidates, _front()) for device in ("cpu", "cuda")}
    for index, candidate in enumerate(candidates):
        device = "cpu" if candidate.kind == "cpu" else "cuda"
        found.append(_finding(decisions[device].verdicts[index], answers.get(device)))
    return found


def _finding(verdict: Verdict, answer: Answer | None) -> Finding:
    candidate = verdict.candidate
    word, reason, opened = "accepted" if verdict.accepted else "refused", verdict.reason, False
    steps: tuple[str, ...] = ()
    if answer is not None and answer.backend is not None and answer.backend.folder == candidate.folder:
        off = [f"{feature} is off: {why}" for feature, why in answer.backend.disabled.items()]
        fits = [reason, "is open"] if reason != "fits" else ["fits and is open"]
        lacking = [text for text in (_lacking(answer.backend),) if text]
        word, reason, opened, steps = "opened", "; ".join([*fits, *lacking, *off]), True, answer.steps
    elif answer is not None and verdict.accepted and answer.steps:
        word, reason, steps = "failed", answer.cause, answer.steps
    return Finding(
        candidate.name, candidate.kind, candidate.place, candidate.version, word, reason, opened, steps
    )


def _reference(device_type: str, text: str, remarks: str | None = None) -> Answer:
    return Answer(device_type, None, text, text, warning=remarks)


def _front() -> Front:
    return Front(_discovery.front_version(), _discovery.PROTOCOL, ABI)


def _decide(device_type: str, torch: Torch, candidates: tuple[Candidate, ...], front: Front) -> Decision:
    return select(
        device_type,
        torch,
        candidates,
        front,
        backend=os.environ.get("MULTIGEMM_BACKEND"),
        fallback=os.environ.get("MULTIGEMM_FALLBACK"),
        any_cuda=os.environ.get("MULTIGEMM_ANY_CUDA"),
    )


def explain_failure(
    decision: Decision, failure: Failure, torch: Torch, front: Front, steps: tuple[str, ...] = ()
) -> str:
    """Write the text of an error or a warning: asked, found, cause, cure. A pure function."""
    raises = decision.on_failure == "raise"
    operands = "arrays" if decision.on_failure == "refuse" else "tensors"
    lines = [f"multigemm: no usable backend for {decision.device_type!r} {operands}"]
    if decision.on_failure not in ("raise", "refuse"):
        lines[0] += ", the slower torch reference is used instead"
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
    if decision.on_failure != "refuse":  # the command needs PyTorch, which arrays may do without
        lines.append("  `multigemm doctor` shows the whole picture")
    return "\n".join(lines)
