"""Guards against: a README whose example does not run, or whose map leads to files that moved."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = ["README.md", "packages/multigemm/README.md"]
ROUTE = re.compile(r"^\d\. \[.+?\]\((?P<path>[^)]+)\)", re.MULTILINE)


def examples():
    found = []
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)):
            found.append(pytest.param(code, id=f"{name}-{i}"))
    return found


def route():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## The route of one call")[1].split("\n## ")[0]
    return [match["path"] for match in ROUTE.finditer(section)]


@pytest.mark.parametrize("code", examples())
def test_example_runs(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_for_two_gpus_runs_on_the_cpu(tmp_path):
    """With both devices the CPU; on two GPUs tests/gpu runs it as it is."""
    text = (ROOT / "docs" / "multi-device.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code.count("cuda:0") == 1 and code.count("cuda:1") == 3
    test_example_runs(code.replace("cuda:0", "cpu").replace("cuda:1", "cpu"), tmp_path)


def test_every_readme_has_an_example():
    assert {p.id.rsplit("-", 1)[0] for p in examples()} == set(READMES)


def test_the_example_is_short():
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    statements = [line for line in code.splitlines() if line.strip()]
    assert len(statements) <= 10


def test_the_route_has_five_stops():
    assert len(route()) == 5


@pytest.mark.parametrize("path", route())
def test_a_stop_of_the_route_exists_and_names_the_operator(path):
    assert (ROOT / path).is_file(), path
    assert "grouped_mm" in (ROOT / path).read_text(encoding="utf-8"), f"{path} does not mention grouped_mm"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_mentions_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    tops = "packages|shared|tests|ci|docs"
    mentioned = set(re.findall(rf"[`(]((?:{tops})/[\w./-]*)[`)]", text))
    mentioned |= set(re.findall(r"`((?:ci|\.ci)/[\w.]+|[A-Z]+(?:\.md)?|noxfile\.py)`", text))
    assert len(mentioned) >= 5
    missing = sorted(m for m in mentioned if not (ROOT / m).exists())
    assert missing == []
