"""``multigemm doctor`` and the command line itself."""

from __future__ import annotations

import builtins
import importlib
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import multigemm
from multigemm import _dispatch
from multigemm._resolution import Finding
from multigemm.cli import doctor
from multigemm.cli._app import app

CPU = torch.device("cpu")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_doctor_as_data() -> None:
    done = invoke("doctor", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["multigemm"]["version"] == multigemm.__version__
    assert report["torch"]["version"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert report["healthy"] is True
    tests = {t["implementation"]: t for t in report["self_test"] if t["device"] == "cpu"}
    assert {"default", "reference", "torch", "native", "blas", "simt"} <= set(tests)
    assert tests["default"]["status"] == "ok"
    assert tests["default"]["error"] < 1e-12
    native = "ok" if _dispatch.backend_for("cpu") else "unavailable"
    assert {tests[name]["status"] for name in ("native", "simt")} == {native}


@pytest.mark.parametrize("start", [["-m", "multigemm"], ["-c", "from multigemm.cli import main; main()"]])
def test_doctor_in_a_process_of_its_own(start: list[str]) -> None:
    command = [sys.executable, *start, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The CPU computes right products." in done.stdout
    assert done.stderr == ""


def test_doctor_shows_the_environment_and_a_refused_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Finding("cu13", "cuda", "/some/where", "0.0.9", "refused", "its version is [0.0.9]", False)
    monkeypatch.setattr(_dispatch, "findings", lambda: [broken])
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    monkeypatch.setenv("COLUMNS", "200")
    text = invoke("doctor").stdout
    assert "cu13" in text
    assert "its version is [0.0.9]" in text
    assert "MULTIGEMM_CHECK" in text
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["environment"]["MULTIGEMM_CHECK"] == "1"
    assert report["backends"][0]["verdict"] == "refused"


@pytest.mark.parametrize("error", [OSError("libgone.so: cannot open"), RuntimeError("driver too old")])
def test_a_broken_product_is_a_line_of_the_report(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(multigemm, "grouped_mm", broken)
    done = invoke("doctor")
    assert done.exit_code == 1
    assert str(error) in done.stdout
    assert isinstance(done.exception, SystemExit)


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = multigemm.grouped_mm
    monkeypatch.setattr(multigemm, "grouped_mm", lambda *a, **k: right(*a, **k) * (1 + 1e-9))
    assert {t["status"] for t in doctor.self_test(CPU) if t["implementation"] == "default"} == {"wrong"}
    assert invoke("doctor", "--json").exit_code == 1


def test_a_tail_that_is_not_zero_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = multigemm.grouped_mm

    def tail(*arguments: Any, **options: Any) -> torch.Tensor:
        y = right(*arguments, **options)
        y[-1] = float("nan")
        return y

    monkeypatch.setattr(multigemm, "grouped_mm", tail)
    assert {t["status"] for t in doctor.self_test(CPU) if t["implementation"] == "default"} == {"wrong"}


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Make one package impossible to import, whether it is installed or not."""
    real = importlib.import_module

    def fake(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", fake)


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("sklearn", ["demo", "--moe"], "demo"),
        ("ase", ["demo", "--atoms"], "demo"),
        ("matplotlib", ["bench", "--device", "cpu", "--plot", "x.png"], "bench"),
    ],
)
def test_a_missing_extra_is_one_sentence(
    missing: str, arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, missing)
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert f'python -m pip install "multigemm[{extra}]"' in done.stderr
    assert missing in done.stderr
    assert done.stderr.count("\n") == 1
    assert isinstance(done.exception, SystemExit)


def test_doctor_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *arguments: Any) -> ModuleType:
        assert name.partition(".")[0] not in ("sklearn", "ase", "matplotlib")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", fake)
    assert invoke("doctor").exit_code == 0


def test_the_library_imports_nothing_of_the_command_line() -> None:
    code = (
        "import sys, multigemm\n"
        "heavy = ('typer', 'rich', 'sklearn', 'ase', 'matplotlib')\n"
        "print([m for m in sys.modules if m.partition('.')[0] in heavy or m.startswith('multigemm.cli')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_the_commands() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in ("doctor", "demo", "bench"))
