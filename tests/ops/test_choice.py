"""Which implementation computes a call: the order of precedence, pins, and third parties."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import multigemm
from multigemm import _choice, errors

SIZES = torch.tensor([1, 2, 0])
X, W = torch.randn(4, 3), torch.randn(3, 3, 2)

SOURCES = ("argument", "context", "environment", "property")


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_precedence(given: tuple[bool, ...]) -> None:
    """argument > context > environment > property > default, for all sixteen cases."""
    names = [source if there else "" for source, there in zip(SOURCES, given, strict=True)]
    choice = _choice.pick(*names)
    first = next((source for source, there in zip(SOURCES, given, strict=True) if there), "default")
    assert choice == _choice.Choice("" if first == "default" else first, first)


class Prefers(multigemm.accelerator.Accelerator):
    def get_property(self, key: str) -> str | None:
        return "torch" if key == "grouped_mm" else None


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_precedence_of_a_real_call(given: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    argument, context, environment, prefers = given
    if environment:
        monkeypatch.setenv("MULTIGEMM_IMPLEMENTATION", "reference")
    else:
        monkeypatch.delenv("MULTIGEMM_IMPLEMENTATION", raising=False)
    before = dict(multigemm.accelerator._registry._registered)
    if prefers:
        multigemm.register_accelerator("cpu", Prefers, replace=True)
    try:
        with multigemm.use("reference" if context else None):
            found = multigemm.explain(X, W, SIZES, implementation="torch" if argument else None)
            multigemm.grouped_mm(X, W, SIZES, implementation="torch" if argument else None)
    finally:
        multigemm.accelerator._registry._registered.clear()
        multigemm.accelerator._registry._registered.update(before)
        multigemm.accelerator._registry._cache.clear()
    expected = next((s for s, there in zip(SOURCES, given, strict=True) if there), "default")
    assert found.source == expected
    assert found.named == {"argument": "torch", "property": "torch", "default": ""}.get(expected, "reference")


def test_use_nests_and_ends() -> None:
    assert _choice.pinned() == ""
    with multigemm.use("reference"):
        with multigemm.use("torch"):
            assert _choice.pinned() == "torch"
            with multigemm.use(None):
                assert _choice.pinned() == ""
        assert _choice.pinned() == "reference"
    with pytest.raises(ZeroDivisionError), multigemm.use("torch"):
        1 / 0  # noqa: B018
    assert _choice.pinned() == ""


def test_use_is_of_its_thread() -> None:
    seen = []
    with multigemm.use("reference"):
        thread = threading.Thread(target=lambda: seen.append(_choice.pinned()))
        thread.start()
        thread.join()
    assert seen == [""]


def test_unknown_names() -> None:
    sentence = "there is no implementation 'fast'; there are: reference, torch, native, blas, simt"
    with pytest.raises(errors.OptionError, match=r"use\(\): " + sentence), multigemm.use("fast"):
        pass
    with pytest.raises(errors.OptionError, match=f"grouped_mm: {sentence}"):
        multigemm.grouped_mm(X, W, SIZES, implementation="fast")


def test_unknown_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGEMM_IMPLEMENTATION", "fast")
    with pytest.raises(
        errors.OptionError, match="MULTIGEMM_IMPLEMENTATION: there is no implementation 'fast'"
    ):
        multigemm.grouped_mm(X, W, SIZES)


def test_native_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from multigemm import _dispatch

    monkeypatch.setattr(_dispatch, "backend_for", lambda device_type: None)
    with pytest.raises(
        errors.NotInstalled, match=r"implementation 'blas' needs a native backend.*multigemm\[cpu\]"
    ):
        multigemm.grouped_mm(X, W, SIZES, implementation="blas")
    assert issubclass(errors.NotInstalled, ImportError)
    torch.testing.assert_close(
        multigemm.grouped_mm(X, W, SIZES, implementation="torch"),
        multigemm.grouped_mm(X, W, SIZES, implementation="reference"),
    )


def test_explain_tells_of_every_implementation(implementation: str, device: torch.device) -> None:
    x, w, sizes = X.to(device), W.to(device), SIZES.to(device)
    found = multigemm.explain(x, w, sizes, implementation=implementation or None)
    assert found.operator == "grouped_mm" and found.device == str(x.device)
    assert found.named == implementation
    assert found.kernel in str(found) and found.as_dict()["kernel"] == found.kernel
    if implementation == "reference":
        assert found.implementation == "reference"
    wgrad = multigemm.explain(x, x, sizes, op="grouped_mm_wgrad", implementation=implementation or None)
    assert wgrad.operator == "grouped_mm_wgrad" and wgrad.kernel
    with pytest.raises(errors.ShapeError):
        multigemm.explain(x, w[:, :2], sizes)
    with pytest.raises(errors.OptionError, match="op must be"):
        multigemm.explain(x, w, sizes, op="matmul")


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """An environment in which the example package is installed."""
    source = Path(__file__).parent / "example_plugin"
    (tmp_path / "multigemm_example.py").write_bytes((source / "multigemm_example.py").read_bytes())
    info = tmp_path / "multigemm_example_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-example-plugin\nVersion: 1.0\n")
    lines = []
    for line in (source / "pyproject.toml").read_text().splitlines():
        if line.startswith('[project.entry-points."'):
            lines.append(f"[{line.split(chr(34))[1]}]")
        elif lines and " = " in line and "multigemm_example:" in line:
            lines.append(line.replace('"', ""))
    (info / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    return {**os.environ, "PYTHONPATH": path}


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_third_party_accelerator_and_implementation(plugin: dict[str, str]) -> None:
    """Installed, it is used without a word; the user's word still comes first."""
    out = run(
        """
        import torch, multigemm, multigemm_example
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        w = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
        s = torch.tensor([1, 2, 0])
        y = multigemm.grouped_mm(x, w, s)
        torch.testing.assert_close(y, multigemm.grouped_mm(x, w, s, implementation="reference"))
        assert multigemm_example.calls == ["grouped_mm"], multigemm_example.calls
        y.sum().backward()  # the gradient in x is a product too, and the property names it
        multigemm.grouped_mm_wgrad(x, y, s, implementation="row_by_row")
        print(multigemm_example.calls, multigemm.get_accelerator("cpu").capability())
        print(multigemm.explain(x, w, s).implementation, multigemm.explain(x, w, s).source)
        with multigemm.use("reference"):
            assert multigemm.explain(x, w, s).implementation == "reference"
        """,
        plugin,
    )
    assert out.splitlines() == [
        "['grouped_mm', 'grouped_mm', 'grouped_mm_wgrad'] ('counting', 1)",
        "row_by_row property",
    ]


def test_a_broken_third_party_disturbs_nobody_else(plugin: dict[str, str]) -> None:
    out = run(
        """
        import torch, multigemm
        multigemm.grouped_mm(torch.ones(2, 2), torch.ones(1, 2, 2), [2])
        try:
            multigemm.accelerator._registry._factory("broken")
        except multigemm.errors.OptionError as error:
            print(error)
        """,
        plugin,
    )
    assert "'broken' of the entry points 'multigemm.accelerators'" in out
    assert "multigemm-example-plugin" in out and "fails to load: AttributeError" in out
