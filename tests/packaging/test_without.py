"""Builds without a defence, for tests of the tests: where they are refused, and what has to fail on them."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from loading_kit import ask, ci_script

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake")
PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(without LANGUAGES NONE)
include({shared}/cmake/MultigemmBackend.cmake)
multigemm_leave_out(json {kind})
get_property(flags SOURCE {shared}/runtime/device.cpp PROPERTY COMPILE_DEFINITIONS)
message(STATUS "TOLD ${{json}} ${{flags}}")
"""


@pytest.mark.skipif(CMAKE is None, reason="there is no cmake")
@pytest.mark.parametrize(
    ("kind", "without", "environment", "told"),
    [
        ("cuda", "", {}, "TOLD [] "),
        ("cuda", "", {"CIBUILDWHEEL": "1"}, "TOLD [] "),
        ("cuda", "guard", {}, 'TOLD ["guard"] MG_WITHOUT_GUARD'),
        ("rocm", "stream", {}, 'TOLD ["stream"] MG_WITHOUT_STREAM'),
        ("cuda", "pool-key", {}, 'TOLD ["pool-key"] MG_WITHOUT_POOL_KEY'),
        ("cuda", "pool", {}, "it takes guard, stream or pool-key"),
        ("cuda", "guard;stream", {}, "it takes guard, stream or pool-key"),
        ("cpu", "guard", {}, "MULTIGEMM_WITHOUT=guard is for GPU backends"),
        ("cuda", "guard", {"CIBUILDWHEEL": "1"}, "wheels for publication have every"),
    ],
)
def test_the_option(tmp_path, kind, without, environment, told):
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(shared=ROOT / "shared", kind=kind))
    done = subprocess.run(
        [CMAKE, "-S", str(tmp_path), "-B", str(tmp_path / "b"), f"-DMULTIGEMM_WITHOUT={without}"],
        env={k: v for k, v in os.environ.items() if k != "CIBUILDWHEEL"} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = " ".join((done.stdout + done.stderr).split())
    assert told.strip() in text, text
    assert (done.returncode == 0) == told.startswith("TOLD")
    assert ("results may be wrong" in text) == (done.returncode == 0 and without != "")


def wheel(folder, without):
    path = folder / "multigemm_cu13-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("multigemm_cu13/backend.json", json.dumps({"kind": "cuda", "without": without}))
    return path


@pytest.mark.parametrize(
    ("without", "arguments", "text"),
    [
        (["guard"], [], "the wheel cu13 was built without ['guard'], asked is nothing"),
        ([], ["--gpus", "2", "--without", "guard"], "the wheel cu13 was built without nothing, asked is ["),
        (["stream"], ["--gpus", "2", "--without", "guard"], "was built without ['stream'], asked is ['guard"),
        ([], ["--without", "guard"], "give --gpus 2"),
    ],
)
def test_a_wheel_is_not_taken_for_another(tmp_path, without, arguments, text):
    command = [sys.executable, str(ROOT / "ci" / "gpu_tests.py"), "--backend", "cu13"]
    command += ["--wheel", str(wheel(tmp_path, without)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and text in done.stderr, done.stderr


@pytest.mark.parametrize("told", ["query", "info"])
def test_a_build_without_a_defence_cannot_be_mistaken(site, told):
    cuda13 = site.stub_torch("2.13.0+cu130", cuda="13.0").stub_front()
    if told == "query":
        cuda13.backend("cu13", query={"abi": 1, "without": ["guard"]})
    else:
        folder = cuda13.backend("cu13")
        info = json.loads((folder / "backend.json").read_text())
        (folder / "backend.json").write_text(json.dumps({**info, "without": ["guard"]}))
    answer = ask("cuda", cuda13)
    text = "it was built without its guard, for tests alone: results may be wrong"
    assert answer["warnings"] == [f"multigemm: backend cu13: {text}"]
    assert answer["findings"][0][2] == "opened" and answer["findings"][0][3].endswith(text)


SUITE = """
import os, signal, time
import pytest
def test_fails(): assert False, "as it has to"
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
{more}
"""


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ("def test_passes(): pass", 1, "test_passes: PASSED OR SKIPPED"),
        ("def test_skips(): pytest.skip('not here')", 1, "test_skips: PASSED OR SKIPPED"),
        (
            "@pytest.fixture\ndef broken(): assert 0, 'a word'\ndef test_errs(broken): pass",
            1,
            "test_errs: NOT RUN, an error before or after it",
        ),
        ("def test_hangs(): time.sleep(300)", 0, "test_hangs: failed: still running after 20 s"),
    ],
    ids=["passes", "skips", "errs", "hangs"],
)
def test_what_passes_without_its_defence_is_a_fault(tmp_path, capsys, monkeypatch, more, status, text):
    script = ci_script("gpu_tests")
    monkeypatch.setattr(script, "SECONDS", 20 if "hangs" in more else 120)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(SUITE).format(more=more))
    pytest_here = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path)]
    found = script.must_fail(pytest_here, dict(os.environ), "guard", [str(tmp_path / "test_suite.py")])
    told = capsys.readouterr().out
    assert found == status and text in told, told
    assert "test_fails: failed: AssertionError: as it has to" in told
    assert "test_dies: failed: ended by signal 9" in told


def test_no_marked_test_is_a_fault(tmp_path):
    (tmp_path / "test_suite.py").write_text("")
    with pytest.raises(SystemExit, match="no test is marked with the defence guard"):
        ci_script("gpu_tests").must_fail(
            [sys.executable, "-m", "pytest"], dict(os.environ), "guard", [str(tmp_path)]
        )
