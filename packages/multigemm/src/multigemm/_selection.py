"""Which backend serves a device type: pure functions from data to a decision.

Nothing here reads a file, the environment or a module, so a table of cases tests every rule without a
GPU. Versions are tuples of integers and never numbers: ``"7.14.60850"`` is newer than ``"7.2"``.

The rules, in order:

1. CPU operands look at backends of kind ``cpu`` only; device type ``cuda`` looks at kind ``rocm`` when
   PyTorch was built for HIP and at kind ``cuda`` otherwise; any other device type takes the reference.
2. A GPU backend's major must be PyTorch's. That is settled before anything is opened.
3. ``MULTIGEMM_BACKEND`` narrows the choice by name and lifts none of the checks. Beside it,
   ``MULTIGEMM_ANY_CUDA=1`` lifts one: the backend that it names may be of another CUDA major than PyTorch.
4. One name in two folders is refused, because nobody can say which copy an import would give.
5. Protocol and ABI numbers and the version must equal the front's; PyTorch must reach the floor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import (
    AbiSkew,
    Ambiguous,
    BackendError,
    BrokenMetadata,
    FlavourMismatch,
    NotInstalled,
    VersionSkew,
)
from ._versions import Version, parse_version, same_release, show

_VENDOR = {"cuda": "CUDA", "rocm": "ROCm", "cpu": "CPU"}
# Extras of the front that exist, by kind and major; another major has no wheel to offer.
_EXTRAS = {("cuda", 12): "cu12", ("cuda", 13): "cu13", ("rocm", 7): "rocm", ("cpu", None): "cpu"}
_KNOWN_NAMES = ("cpu", "cu12", "cu13", "rocm", "none")


@dataclass(frozen=True)
class Flavour:
    """What PyTorch was built for: kind ``cpu``, ``cuda`` or ``rocm``, and that toolkit's version."""

    kind: str
    version: Version = ()

    def __str__(self) -> str:
        return f"{_VENDOR[self.kind]} {show(self.version)}" if self.version else f"{_VENDOR[self.kind]} build"


@dataclass(frozen=True)
class Torch:
    """PyTorch's version text (``"2.13.0+cu130"``), its numbers, and its flavour.

    ``name`` is another library's where that one brings the arrays (CuPy, NumPy): its CUDA major counts
    as PyTorch's does, and no PyTorch has to be there.
    """

    text: str
    version: Version
    flavour: Flavour
    name: str = "PyTorch"

    @classmethod
    def of(cls, version: str, cuda: str | None, hip: str | None) -> Torch:
        """Build from the texts of ``torch.version``; hip goes first, as ROCm builds may set both."""
        if hip:
            flavour = Flavour("rocm", parse_version(hip))
        elif cuda:
            flavour = Flavour("cuda", parse_version(cuda))
        else:
            flavour = Flavour("cpu")
        return cls(version, parse_version(version), flavour)

    def __str__(self) -> str:
        return f"{self.name} {self.text} ({self.flavour})"


@dataclass(frozen=True)
class Front:
    """The numbers that a backend has to share with this package."""

    version: str
    protocol: int = 1
    abi: int = 1


@dataclass(frozen=True)
class Candidate:
    """One installed backend as its metadata describes it; ``error`` says why it could not be read.

    ``folder`` is None when the distribution is recorded but its package is not there.
    ``record`` is the folder of the distribution's metadata.
    """

    name: str
    distribution: str
    version: str
    folder: str | None
    info: Mapping[str, Any] | None = None
    error: str | None = None
    record: str = ""

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda``, ``rocm`` or another word; judged by the name where metadata cannot be read."""
        kind = self.info.get("kind") if self.info else None
        if isinstance(kind, str):
            return kind
        if self.name == "cpu":
            return "cpu"
        return "cuda" if re.fullmatch(r"cu\d+", self.name) else "rocm" if "rocm" in self.name else "unknown"

    @property
    def major(self) -> int | None:
        """CUDA's or ROCm's major; judged by the name where metadata cannot be read."""
        major = self.info.get("major") if self.info else None
        if isinstance(major, int):
            return major
        digits = re.fullmatch(r"(?:cu|rocm)(\d+)", self.name)
        return int(digits.group(1)) if digits else None

    @property
    def place(self) -> str:
        """The folder to show a person."""
        return self.folder or self.record


@dataclass(frozen=True)
class Failure:
    """Why no backend serves: the error class, one cause, one cure. An error value that can be kept."""

    error: type[BackendError]
    cause: str
    cure: str
    backend: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What was decided about one candidate. ``failure`` is None exactly when it was accepted."""

    candidate: Candidate
    accepted: bool
    reason: str
    failure: Failure | None = None


@dataclass(frozen=True)
class Decision:
    """The outcome for one device type.

    Exactly one holds: ``chosen`` is the backend to open; or ``failure`` says why there is none; or both
    are None and the reference answers as a matter of course. ``on_failure`` says what a failure means
    (also one that opening meets later): ``"raise"``, ``"warn"`` (the reference answers, one warning) or
    ``"silent"``; for arrays of other libraries ``"refuse"``, an error that knows no fallback. ``notes``
    are remarks on the environment variables.
    """

    device_type: str
    chosen: Candidate | None
    failure: Failure | None
    verdicts: tuple[Verdict, ...]
    on_failure: str
    notes: tuple[str, ...] = ()


def pip_install(requirement: str) -> str:
    """Return the pip line for one requirement."""
    return f'python -m pip install "{requirement}"'


def reinstall_line(distribution: str, version: str) -> str:
    """Return the pip line that replaces one distribution's files."""
    return f'python -m pip install --force-reinstall --no-deps "{distribution}=={version}"'


def _extra_cure(front: Front, torch: Torch, kind: str) -> str:
    """The pip line that brings the backend for this kind of device and this PyTorch."""
    if kind == "cpu":
        return pip_install(f"multigemm[cpu]=={front.version}")
    flavour = torch.flavour
    if flavour.kind == "cpu":
        return (
            "install a PyTorch built for this GPU (CUDA 12, CUDA 13 or ROCm 7), then run `multigemm doctor`"
        )
    extra = _EXTRAS.get((flavour.kind, flavour.version[0]))
    if extra is None:
        offered = "CUDA 12 or 13" if flavour.kind == "cuda" else "ROCm 7"
        return f"install a {torch.name} built for {offered}: there is no multigemm wheel for {flavour}"
    return pip_install(f"multigemm[{extra}]=={front.version}")


def _check(
    candidate: Candidate, kind: str, torch: Torch, front: Front, pinned: str | None, any_cuda: bool
) -> Verdict:
    """Judge one candidate by itself; rivals are looked at afterwards."""

    def refuse(error: type[BackendError], reason: str, cure: str) -> Verdict:
        cause = f"backend {candidate.name}: {reason}"
        return Verdict(candidate, False, reason, Failure(error, cause, cure, candidate.name))

    if kind != "cpu" and torch.flavour.kind == "cpu" and candidate.kind != "unknown":
        return refuse(FlavourMismatch, f"this {torch} has no GPU support", _extra_cure(front, torch, kind))
    if candidate.kind == "unknown" and candidate.error is not None:
        return refuse(BrokenMetadata, candidate.error, reinstall_line(candidate.distribution, front.version))
    if candidate.kind != kind:
        reason = f"serves {_VENDOR.get(candidate.kind, candidate.kind)} devices"
        if kind != "cpu":
            reason += f", this {torch} needs a {_VENDOR[kind]} backend"
        return refuse(FlavourMismatch, reason, _extra_cure(front, torch, kind))
    if pinned is not None and candidate.name != pinned:
        reason = f"MULTIGEMM_BACKEND={pinned} asks for another backend"
        return refuse(NotInstalled, reason, _extra_cure(front, torch, kind))
    # A backend whose metadata cannot be read may have no major to compare; its own fault is told below.
    fits = "fits"
    if kind != "cpu" and candidate.major is not None and candidate.major != torch.flavour.version[0]:
        built = f"built for {_VENDOR[kind]} {candidate.major}"
        reason = f"{built}, while this {torch.name} is built for {torch.flavour}"
        if not (any_cuda and kind == "cuda" and pinned == candidate.name):
            return refuse(FlavourMismatch, reason, _extra_cure(front, torch, kind))
        fits = f"{reason}, which MULTIGEMM_ANY_CUDA=1 lets by"
    if candidate.error is not None or candidate.info is None:
        reason = candidate.error or "its metadata cannot be read"
        return refuse(BrokenMetadata, reason, reinstall_line(candidate.distribution, front.version))
    for label, theirs, ours in (
        ("protocol", candidate.info.get("protocol"), front.protocol),
        ("ABI", candidate.info.get("abi"), front.abi),
    ):
        if theirs != ours:
            reason = f"it speaks {label} {theirs}, multigemm {front.version} speaks {label} {ours}"
            return refuse(AbiSkew, reason, reinstall_line(candidate.distribution, front.version))
    if kind != "cpu" and candidate.major is None:
        reason = f"its metadata names no {_VENDOR[kind]} major"
        return refuse(BrokenMetadata, reason, reinstall_line(candidate.distribution, front.version))
    if not same_release(candidate.version, front.version):
        reason = f"its version is {candidate.version}, multigemm's is {front.version}; they have to be equal"
        return refuse(VersionSkew, reason, pip_install(f"{candidate.distribution}=={front.version}"))
    floor: Version = tuple(candidate.info["min_torch"])
    if torch.name == "PyTorch" and torch.version < floor:
        reason = f"it needs PyTorch {show(floor)} or newer, this is {torch.text}"
        return refuse(VersionSkew, reason, pip_install(f"torch>={show(floor)}"))
    return Verdict(candidate, True, fits)


def _fits_the_device(verdict: Verdict) -> bool:
    """Whether the candidate is meant for this device and PyTorch, sound or not."""
    if verdict.candidate.kind == "unknown":
        return False
    return verdict.failure is None or verdict.failure.error not in (FlavourMismatch, NotInstalled)


def _settle_rivals(verdicts: Sequence[Verdict], device_type: str) -> tuple[list[Verdict], Failure | None]:
    """Refuse every candidate that shares its place with another one; say so in one failure."""
    meant = [v for v in verdicts if _fits_the_device(v) and v.candidate.folder is not None]
    by_name: dict[str, list[Candidate]] = {}
    for verdict in meant:
        by_name.setdefault(verdict.candidate.name, []).append(verdict.candidate)
    twins = [group for group in by_name.values() if len(group) > 1]
    accepted = [v.candidate for v in meant if v.accepted]
    if twins:
        rivals = twins[0]
        name = rivals[0].name
        folders = " and ".join(f"{c.folder} (version {c.version})" for c in rivals)
        cause = f"backend {name} is installed in {len(rivals)} folders: {folders}"
        cure = f"remove one of them: python -m pip uninstall {rivals[0].distribution}"
    elif len(accepted) > 1:
        rivals = accepted
        names = sorted(c.name for c in rivals)
        name = names[0]
        cause = f"backends {', '.join(names)} all fit {device_type!r} tensors"
        cure = f"name the one you want, e.g. MULTIGEMM_BACKEND={name}, or uninstall the others"
    else:
        return list(verdicts), None
    failure = Failure(Ambiguous, cause, cure, name)
    settled = [
        Verdict(v.candidate, False, f"ambiguous: {cause}", failure) if v.candidate in rivals else v
        for v in verdicts
    ]
    return settled, failure


def _main_failure(
    verdicts: Sequence[Verdict], kind: str, torch: Torch, front: Front, device_type: str, pinned: str | None
) -> Failure:
    """The one cause to report when nothing was accepted: the nearest miss."""
    cure = _extra_cure(front, torch, kind)
    failures = [v.failure for v in verdicts if v.failure is not None]
    if kind != "cpu" and torch.flavour.kind == "cpu":
        return Failure(FlavourMismatch, f"this {torch} has no GPU support", cure)
    of_kind = [v.failure for v in verdicts if v.failure is not None and v.candidate.kind == kind]
    if pinned is not None:
        of_kind = [f for f in failures if f.backend == pinned]
        if not of_kind:
            cause = f"MULTIGEMM_BACKEND={pinned}, but no backend of that name is installed"
            if pinned not in _KNOWN_NAMES:
                cause += f" (known names: {', '.join(_KNOWN_NAMES)})"
            if pinned in _EXTRAS.values():
                cure = pip_install(f"multigemm[{pinned}]=={front.version}")
            return Failure(NotInstalled, cause, f"{cure}, or unset MULTIGEMM_BACKEND", pinned)
    near = [f for f in of_kind if f.error is not FlavourMismatch]
    if near or of_kind:
        return (near or of_kind)[0]
    gpu_rivals = [v.candidate for v in verdicts if v.candidate.kind not in ("cpu", "unknown")]
    if kind != "cpu" and gpu_rivals:
        names = ", ".join(sorted({c.name for c in gpu_rivals}))
        cause = f"only {names} is installed, this {torch} needs a {_VENDOR[kind]} backend"
        return Failure(FlavourMismatch, cause, cure)
    return Failure(NotInstalled, f"no backend for {device_type!r} tensors is installed", cure)


def select(
    device_type: str,
    torch: Torch,
    candidates: Sequence[Candidate],
    front: Front,
    *,
    backend: str | None = None,
    fallback: str | None = None,
    any_cuda: str | None = None,
) -> Decision:
    """Choose the backend for tensors of ``device_type``.

    ``backend``, ``fallback`` and ``any_cuda`` are the values of MULTIGEMM_BACKEND, MULTIGEMM_FALLBACK and
    MULTIGEMM_ANY_CUDA, or None.
    Never raises for what a user may have installed or set: the answer is in the decision.
    """
    backend = (backend or "").strip().lower() or None
    fallback = (fallback or "").strip().lower() or None
    if device_type == "cpu":
        kind, on_failure = "cpu", "warn"
    elif device_type == "cuda":
        kind = "rocm" if torch.flavour.kind == "rocm" else "cuda"
        on_failure = "warn" if fallback == "torch" else "raise"
    else:
        return Decision(device_type, None, None, (), "silent")

    notes: list[str] = []
    if fallback not in (None, "torch"):
        notes.append(f"MULTIGEMM_FALLBACK={fallback} is not understood and ignored; the one value is 'torch'")
    any_cuda = (any_cuda or "").strip() or None
    if any_cuda not in (None, "0", "1"):
        notes.append(f"MULTIGEMM_ANY_CUDA={any_cuda} is not understood and ignored; the values are 0 and 1")
    elif any_cuda == "1" and kind == "cuda" and backend is None:
        notes.append("MULTIGEMM_ANY_CUDA=1 is ignored: MULTIGEMM_BACKEND has to name the backend")
    pinned = backend
    if kind == "cpu" and backend not in ("cpu", "none"):
        # A pinned GPU backend says nothing about CPU calls; a pinned third-party CPU backend does.
        cpu_names = {c.name for c in candidates if c.kind == "cpu"}
        pinned = backend if backend in cpu_names else None
        if backend is not None and backend not in {*_KNOWN_NAMES, *(c.name for c in candidates)}:
            notes.append(
                f"MULTIGEMM_BACKEND={backend} names no installed backend and is ignored for CPU tensors "
                f"(known names: {', '.join(_KNOWN_NAMES)})"
            )
    if pinned == "none" or (pinned == "cpu" and kind != "cpu"):
        cause = f"MULTIGEMM_BACKEND={pinned} allows no backend for {device_type!r} tensors"
        cure = "unset MULTIGEMM_BACKEND, or set MULTIGEMM_FALLBACK=torch to take the slower torch reference"
        refused = Failure(NotInstalled, cause, cure, pinned)
        verdicts = tuple(Verdict(c, False, cause, refused) for c in candidates)
        return Decision(
            device_type,
            None,
            None if kind == "cpu" else refused,
            verdicts,
            "silent" if kind == "cpu" else on_failure,
            tuple(notes),
        )

    judged = [_check(c, kind, torch, front, pinned, any_cuda == "1") for c in candidates]
    if kind != "cpu" and torch.flavour.kind == "cpu":
        failure = _main_failure(judged, kind, torch, front, device_type, pinned)
        return Decision(device_type, None, failure, tuple(judged), on_failure, tuple(notes))
    judged, ambiguous = _settle_rivals(judged, device_type)
    chosen = next((v.candidate for v in judged if v.accepted), None)
    if chosen is not None and ambiguous is None:
        return Decision(device_type, chosen, None, tuple(judged), on_failure, tuple(notes))
    failure = ambiguous or _main_failure(judged, kind, torch, front, device_type, pinned)
    if kind == "cpu" and pinned is None and failure.error is NotInstalled:
        return Decision(device_type, None, None, tuple(judged), "silent", tuple(notes))
    return Decision(device_type, None, failure, tuple(judged), on_failure, tuple(notes))
