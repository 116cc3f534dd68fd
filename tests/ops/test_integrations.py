"""Adapters where their framework is absent, or another version: the error says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pydantic")

from multigemm.integrations import deepspeed, transformers
from multigemm.integrations._optional import require

CALLS = {"transformers": transformers.register, "deepspeed": deepspeed.register}


@pytest.mark.parametrize("name", CALLS)
def test_absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'needs {name}, which is not installed: .*"multigemm\[{name}\]"'):
        CALLS[name]()


@pytest.mark.parametrize("name", CALLS)
def test_another_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(
        ImportError, match=rf"{name} .+ has no {name}\.in\w+; another version of it is needed"
    ):
        CALLS[name]()


@pytest.mark.parametrize("file", ["__init__.py", "part.py"])
def test_an_error_inside_the_framework_is_not_explained_away(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"framework_{file[:4]}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / file).write_text("import what_it_needs_itself\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'what_it_needs_itself'"):
        require(f"{package.name}.part", "framework")


def test_importing_them_imports_no_framework() -> None:
    code = """
        import sys
        import multigemm.integrations.deepspeed
        import multigemm.integrations.torchtitan
        import multigemm.integrations.transformers
        print([n for n in ("transformers", "deepspeed", "torchtitan", "torch._dynamo") if n in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
