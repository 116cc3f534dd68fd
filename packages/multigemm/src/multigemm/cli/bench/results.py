"""The results file: its format, its reading back, and what is told about the machine.

    {machine, date, commit, versions, ceilings: {tflops, tbps},
     rows: [{case, sizes, op, dtype, kernel, floor_ms, ours_ms, peers, rel_err, host_us, peak_bytes}],
     notes: {method, shapes, refused, tables}}

A peer that refuses a case is null in ``peers``; its reason stands in ``notes.refused``. ``notes.shapes``
holds the shapes as they ran, by case and dtype, ``notes.tables`` what was measured of the peers beside time,
by row and implementation.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import multigemm

from .._support import cpu_name, torch_flavour
from .cases import all_cases


@dataclass
class Row:
    case: str
    sizes: str
    op: str
    dtype: str
    kernel: str
    floor_ms: float
    ours_ms: float
    peers: dict[str, float | None]
    rel_err: float
    host_us: float | None
    peak_bytes: int | None

    def best_peer(self) -> float | None:
        times = [t for t in self.peers.values() if t is not None]
        return min(times) if times else None

    def ratio(self) -> float | None:
        """Best peer over ours: above one, ours is faster."""
        best = self.best_peer()
        return None if best is None or self.ours_ms <= 0 else best / self.ours_ms


@dataclass
class Results:
    machine: dict[str, Any]
    date: str
    commit: str
    versions: dict[str, str | None]
    ceilings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def peers(self) -> list[str]:
        """The peers of any row, in the order in which the rows name them."""
        return list(dict.fromkeys(name for row in self.rows for name in row.peers)) or ["torch", "loop"]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_rounded(asdict(self)), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


FIELDS = ("machine", "date", "commit", "versions", "ceilings", "rows", "notes")


def read(path: Path) -> Results:
    """Read a results file; ``ValueError`` says what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in FIELDS if name not in data]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        rows = [Row(**row) for row in data["rows"]]
        return Results(**{**{name: data[name] for name in FIELDS}, "rows": rows})
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no results file: {error}") from None


def _rounded(value: Any) -> Any:
    """Four significant digits, so that a diff of two files shows what changed."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def machine(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {
            "name": cpu_name(),
            "gpu": None,
            "driver": None,
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.machine()}",
        }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"name": cpu_name(), "gpu": name, "driver": _driver(), "system": platform.system()}


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:  # a container may hide the file and still have the tool
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), None)


def commit() -> str:
    """The commit measured: MULTIGEMM_COMMIT, else git's where the package lies in a checkout of its own."""
    named = os.environ.get("MULTIGEMM_COMMIT")
    if named:
        return named
    folder = Path(multigemm.__file__).resolve().parent
    try:
        # In an installed package the nearest repository, if any, is somebody else's.
        if folder.parents[1].joinpath("pyproject.toml").is_file():
            command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
            found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return found.stdout.strip() or "unknown"
    except (OSError, IndexError, subprocess.SubprocessError):
        pass
    return "unknown"


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "multigemm": multigemm.__version__,
        "torch": torch.__version__,
        "flavour": torch_flavour(),
        "cuda": torch.version.cuda,
        "triton": None,
        "python": platform.python_version(),
    }
    try:
        from importlib.metadata import PackageNotFoundError, version

        found["triton"] = version("triton")
    except PackageNotFoundError:
        pass
    from ... import _dispatch

    found.update({f"backend {f.backend}": f.version for f in _dispatch.findings() if f.verdict != "refused"})
    return found


def now() -> str:
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one positive value."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def by_peer(rows: Sequence[Row]) -> list[str]:
    """Geometric means of each peer over ours, by operation, and the least ratio: of whole layers."""
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        for peer in dict.fromkeys(name for row in rows for name in row.peers):
            ratios = [
                (time / row.ours_ms, row) for row in rows if row.op == op and (time := row.peers.get(peer))
            ]
            if ratios:
                lines.append(f"{op}: {peer} / ours = {_mean_and_least(ratios)}")
    return lines


def _mean_and_least(ratios: Sequence[tuple[float, Row]]) -> str:
    least, worst = min(ratios, key=lambda pair: pair[0])
    return (
        f"{geometric_mean(r for r, _ in ratios):.2f} (geometric mean of {len(ratios)}), "
        f"least {least:.2f} ({worst.case}, {worst.sizes}, {worst.dtype})"
    )


SMALL_FLOPS = 2**30


def summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means of best peer over ours, by kind of case and operation, and the least ratio."""
    groups: dict[str, set[str]] = {
        "mixture-of-experts": {c.name for c in all_cases() if c.is_moe},
        "equivariant": {c.name for c in all_cases() if not c.is_moe},
        "small equivariant (under 2^30 FLOP)": {
            c.name for c in all_cases() if not c.is_moe and c.flops() < SMALL_FLOPS
        },
    }
    others = [row for row in rows if row.case not in groups["mixture-of-experts"] | groups["equivariant"]]
    lines = by_peer(others)
    for op in dict.fromkeys(row.op for row in rows):
        for name, members in groups.items():
            pairs = [(row.ratio(), row) for row in rows if row.op == op and row.case in members]
            ratios = [(ratio, row) for ratio, row in pairs if ratio is not None]
            if ratios:
                lines.append(f"{op}, {name}: best peer / ours = {_mean_and_least(ratios)}")
    return lines
