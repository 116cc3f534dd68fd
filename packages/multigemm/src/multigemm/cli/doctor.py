"""``multigemm doctor``: what is installed, what was refused and why, and whether products come out right.

Everything is data first (``examine``) and a table after, so that ``--json`` shows the same. A fault of
one backend or device is a line of the report, never an exception.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from dataclasses import asdict
from typing import Any

import torch
import typer

import multigemm

from .. import _choice, _dispatch, _plugins
from ._support import cpu_name, torch_flavour

OPERATORS = ("grouped_mm", "grouped_mm_wgrad")
TOLERANCE = 1e-12
"""Largest difference of the self-test, whose values are about one."""
VARIABLES = {
    "MULTIGEMM_BACKEND": "names the backend to take, or none",
    "MULTIGEMM_IMPLEMENTATION": "pins the implementation",
    "MULTIGEMM_FALLBACK": "torch: take the reference on a GPU without a backend",
    "MULTIGEMM_ANY_CUDA": "1: the named backend may be of another CUDA major than PyTorch",
    "MULTIGEMM_CHECK": "1: read the group sizes and refuse wrong ones",
    "CUDA_VISIBLE_DEVICES": "hides devices",
    "HIP_VISIBLE_DEVICES": "hides devices",
    "LD_LIBRARY_PATH": "may put another toolkit's libraries first",
}


def run(as_json: bool) -> int:
    """Print the report; 0 where the CPU computes a right product by default, else 1."""
    report = examine()
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0 if report["healthy"] else 1


def examine() -> dict[str, Any]:
    """The whole report as plain data."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tests = [test for device in _devices() for test in self_test(device)]
        devices = [_device(device) for device in _devices()]
        # After the self-test: only now is it known which backends could be opened.
        findings = [asdict(finding) for finding in _dispatch.findings()]
    default = next((t for t in tests if t["device"] == "cpu" and t["implementation"] == "default"), None)
    return {
        "multigemm": {
            "version": multigemm.__version__,
            "folder": os.path.dirname(os.path.abspath(multigemm.__file__)),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "torch": {"version": torch.__version__, "flavour": torch_flavour()},
        "system": {"name": f"{platform.system()} {platform.machine()}", "cpu": cpu_name()},
        "environment": {name: os.environ[name] for name in _variables()},
        "backends": findings,
        "reports": {device.type: _report(device.type) for device in _devices()},
        "devices": devices,
        "self_test": tests,
        "warnings": list(dict.fromkeys(str(w.message) for w in caught)),
        "healthy": default is not None and default["status"] == "ok",
    }


def _variables() -> list[str]:
    ours = sorted(name for name in os.environ if name.startswith("MULTIGEMM_"))
    return [*ours, *(name for name in VARIABLES if name in os.environ and name not in ours)]


def _devices() -> list[torch.device]:
    """The CPU, and the devices of torch's accelerator where there are any."""
    devices = [torch.device("cpu")]
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            devices += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    except RuntimeError:  # a driver that cannot be initialised; the CPU is reported all the same
        pass
    return devices


def _device(device: torch.device) -> dict[str, Any]:
    """What the accelerator says of itself; a fault of a third party's accelerator is its text."""
    entry: dict[str, Any] = {
        "device": str(device),
        "name": None,
        "capability": None,
        "prefers": {},
        "error": None,
    }
    try:
        accelerator = multigemm.get_accelerator(device)
        entry["name"] = accelerator.name
        capability = accelerator.capability()
        entry["capability"] = None if capability is None else str(capability)
        entry["prefers"] = {key: accelerator.get_property(key) for key in OPERATORS}
    except Exception as error:
        entry["error"] = _one_line(error)
    return entry


def _report(device_type: str) -> str:
    """Why the backend of a device type is what it is."""
    try:
        return _dispatch.report(device_type)[0]
    except Exception as error:
        return _one_line(error)


def self_test(device: torch.device) -> list[dict[str, Any]]:
    """One small product, with an empty group and a row of no group, with each implementation.

    Status "ok", "wrong" (it differs from float64), "unavailable" (nobody provides it here) or "failed".
    """
    return [_test(device, name) for name in ("default", *_implementations())]


def _implementations() -> list[str]:
    return [*_choice.BUILT_IN, *sorted(_plugins.names(_choice.GROUP))]


def _test(device: torch.device, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {"device": str(device), "implementation": name, "status": "failed"}
    result.update(error=None, kernel="", detail="")
    sizes = [3, 0, 3]
    try:
        generator = torch.Generator().manual_seed(0)
        host = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((7, 5), (3, 5, 4))]
        expected = _expected(host[0], host[1], sizes)
        # A device without float64 (mps) is tested in float32.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        x, w = (t.to(device, dtype) for t in host)
        chosen = None if name == "default" else name
        y = multigemm.grouped_mm(x, w, sizes, implementation=chosen)
        told = multigemm.explain(x, w, sizes, implementation=chosen)
        result["kernel"] = f"{told.implementation}: {told.kernel}"
        error = float((y.cpu().double() - expected).abs().max())
        result["error"] = error if error == error else None
        tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE
        result["status"] = "ok" if error <= tolerance else "wrong"
    except multigemm.errors.BackendError as error:
        result.update(status="unavailable", detail=_one_line(error))
    except Exception as error:
        result["detail"] = _one_line(error)
    return result


def _expected(x: torch.Tensor, w: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The product from its definition, row by row, with nothing of the library."""
    y = torch.zeros(x.shape[0], w.shape[-1], dtype=torch.float64)
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    for n, g in enumerate(groups):
        y[n] = (x[n, :, None] * w[g]).sum(0)
    return y


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {'; '.join(lines)}" if lines else type(error).__name__


# --- tables ---------------------------------------------------------------------------------------

_STYLES = {"ok": "green", "opened": "green", "accepted": "green", "unavailable": "dim", "refused": "yellow"}


def _styled(word: str) -> str:
    return f"[{_STYLES.get(word, 'red')}]{word}[/]"


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", show_header=bool(columns))
        for column in columns or ("", ""):
            made.add_column(column, overflow="fold")
        return made

    facts = table("multigemm doctor")
    facts.add_row("multigemm", f"{report['multigemm']['version']} in {escape(report['multigemm']['folder'])}")
    facts.add_row("python", f"{report['python']['version']} ({escape(report['python']['executable'])})")
    facts.add_row("torch", f"{report['torch']['version']}, built for {report['torch']['flavour']}")
    facts.add_row("system", f"{report['system']['name']}, {escape(report['system']['cpu'])}")
    for name, value in report["environment"].items():
        facts.add_row(name, f"{escape(value)}  [dim]{VARIABLES.get(name, '')}[/]")
    console.print(facts)

    if report["backends"]:
        backends = table("backends", "name", "version", "verdict", "reason", "folder")
        for entry in report["backends"]:
            reason = "\n".join([entry["reason"], *entry["steps"]])
            row = (entry["backend"], entry["version"], _styled(entry["verdict"]), escape(reason))
            backends.add_row(*row, escape(entry["folder"]))
        console.print(backends)
    else:
        console.print(
            r'backends: none is installed; for the CPU: python -m pip install "multigemm\[cpu]"',
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for device_type, text in report["reports"].items():
        console.print(f"{device_type}: {escape(text)}", highlight=False, soft_wrap=True)

    devices = table("devices", "device", "name", "capability", "prefers")
    for entry in report["devices"]:
        prefers = ", ".join(f"{key}: {value}" for key, value in entry["prefers"].items() if value)
        cells = (entry["device"], entry["name"] or "", entry["capability"] or "")
        devices.add_row(*(escape(c) for c in cells), escape(entry["error"] or prefers or "nothing"))
    console.print(devices)

    tests = table("self-test in float64", "device", "implementation", "status", "error", "kernel or reason")
    for entry in report["self_test"]:
        error = "" if entry["error"] is None else f"{entry['error']:.1e}"
        detail = entry["detail"] or entry["kernel"]
        if entry["status"] == "unavailable":  # the cure is told above, once
            detail = detail.partition(";")[0]
        status = _styled(entry["status"])
        tests.add_row(entry["device"], entry["implementation"], status, error, escape(detail))
    console.print(tests)
    for text in report["warnings"]:
        console.print(f"[yellow]warning[/] {escape(text)}", highlight=False, soft_wrap=True)
    if report["healthy"]:
        console.print("[green]The CPU computes right products.[/]")
    else:
        console.print("[red]The CPU does not compute a right product.[/]")
