"""The wheels of two CUDA majors in one process, without a GPU, and what stands in for an absent cuBLAS.

Public reports behind the cases: handles of one major given to the other
(https://github.com/pytorch/pytorch/issues/88882), a backend for another PyTorch (https://github.com/NVIDIA/cuEquivariance/issues/193).
"""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
from loading_kit import Wheel, ci_script, run_here

WHEELS = [Wheel("cu12"), Wheel("cu13")]
BOTH = all(wheel.installed for wheel in WHEELS)
both = pytest.mark.skipif(not BOTH, reason="multigemm-cu12 and multigemm-cu13 are not both installed")
no_gpu = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")

OPEN = """
import ctypes
from multigemm import _discovery, _opening
from multigemm._resolution import _front
installed = {c.name: c for c in _discovery.installed()}
opened = {}
for name in ORDER:
    opened[name] = _opening.open_core(installed[name], _front(), [])
"""


@both
@no_gpu
@pytest.mark.parametrize("order", [("cu12", "cu13"), ("cu13", "cu12")], ids="-".join)
def test_each_meets_the_blas_of_its_own_major(order):
    code = f"""ORDER = {order!r}{OPEN}
def reaches(name, other):
    try:
        opened[name].handle["mg_query_" + other]
    except AttributeError:
        return False
    return True
show(
    versions={{name: backend.query["blas_version"] for name, backend in opened.items()}},
    names={{name: backend.query["name"] for name, backend in opened.items()}},
    crossed=[[a, b] for a in opened for b in opened if a != b and reaches(a, b)],
    mapped=[p for p in mapped() if "/libcublas" in p or "libcudart" in p],
)
"""
    shown = run_here(code)
    assert shown["names"] == {name: name for name in order}
    assert {name: version // 10000 for name, version in shown["versions"].items()} == {"cu12": 12, "cu13": 13}
    assert shown["crossed"] == []
    # One pair of each major, and no runtime but those that are linked in.
    files = sorted(
        Path(path).name.split(".so.")[0] + "." + path.split(".so.")[1][:2] for path in shown["mapped"]
    )
    assert files == ["libcublas.12", "libcublas.13", "libcublasLt.12", "libcublasLt.13"]


@both
@no_gpu
def test_both_register_with_one_pytorch():
    """A mistake of an installation, or of a test, that must not end the process."""
    code = f"""
import torch, multigemm
for path in {[wheel.binding for wheel in WHEELS]!r}:
    torch.ops.load_library(path)
x, w = torch.ones(3, 2), torch.ones(2, 2, 4)
show(y=multigemm.grouped_mm(x, w, torch.tensor([1, 2])).unique().tolist())
"""
    assert run_here("import warnings\nwarnings.simplefilter('ignore')\n" + code)["y"] == [2.0]


@pytest.mark.parametrize("wheel", WHEELS, ids=[wheel.name for wheel in WHEELS])
def test_the_floors_of_cublas_are_one(wheel):
    """Of the metadata, of backend.json, of what is linked in CI."""
    if not wheel.installed:
        pytest.skip(f"multigemm-{wheel.name} is not installed")
    [needed] = {(e["distribution"], e["min_version"]) for e in wheel.info["needed"]}
    [required] = importlib.metadata.distribution(f"multigemm-{wheel.name}").requires
    assert re.sub(r"[ ()]", "", required).startswith(needed[0])
    assert f">={needed[1]}" in required
    numbers = [int(part) for part in f"{needed[1]}.0".split(".")][:3]
    assert wheel.info["min_blas"] == numbers[0] * 10000 + numbers[1] * 100 + numbers[2]
    folder = Path(__file__).resolve().parents[2] / "ci"
    pins = (folder / "build-constraints.txt").read_text()
    pinned = re.search(rf"^{needed[0]}==([\d.]+)$", pins, re.MULTILINE)
    assert pinned and pinned[1].startswith(f"{needed[1]}."), "CI does not build with the oldest one"
    everywhere = (folder / "constraints.txt").read_text()
    assert f"{needed[0]}==" not in everywhere, "PyTorch's own pin could not be installed"


# What PyTorch's own wheels for CUDA 12 require, by its version and toolkit, from their metadata.
@pytest.mark.parametrize("pin", [(12, 6, 4, 1), (12, 8, 4, 1), (12, 9, 1, 4)])
def test_the_floor_is_no_more_than_what_pytorch_brings(pin):
    wheel = WHEELS[0]
    if not wheel.installed:
        pytest.skip("multigemm-cu12 is not installed")
    floor = tuple(int(part) for part in wheel.info["needed"][0]["min_version"].split("."))
    assert floor <= pin and pin[0] * 10000 + pin[1] * 100 + pin[2] >= wheel.info["min_blas"]


@no_gpu
@pytest.mark.parametrize("wheel", WHEELS, ids=[wheel.name for wheel in WHEELS])
def test_a_stand_in_lets_it_open_and_is_told(wheel, tmp_path):
    """As on a machine whose PyTorch is of the other major: it opens, and knows that it has no cuBLAS."""
    if not wheel.installed:
        pytest.skip(f"multigemm-{wheel.name} is not installed")
    script = ci_script("stand_in_blas")
    symbols = [s for s in script.Library(Path(wheel.core)).undefined if s.startswith("cublas")]
    assert script.TEXT in symbols and len(symbols) > 5
    for entry in wheel.info["needed"]:
        script.compile_one(tmp_path / entry["soname"], entry["soname"], sorted(symbols))
    code = f"""
import ctypes
for soname in {[entry["soname"] for entry in wheel.info["needed"]]!r}:
    ctypes.CDLL({str(tmp_path)!r} + "/" + soname)
handle = ctypes.CDLL({wheel.core!r})
handle.mg_query_{wheel.name}.restype = ctypes.c_char_p
query = json.loads(handle.mg_query_{wheel.name}())
from multigemm._opening import blas_version
found = [p for p in mapped() if "/libcublas" in p]
show(version=query["blas_version"], told=blas_version(query), mapped=found)
"""
    shown = run_here(code)
    assert (shown["version"], shown["told"]) == (0, None)
    assert all(path.startswith(str(tmp_path)) for path in shown["mapped"]) and len(shown["mapped"]) == 2


def test_a_table_of_what_ran(tmp_path):
    majors = ci_script("gpu_majors")
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one" time="1.5"/>'
        '<testcase classname="a" name="two"><skipped message="no cuBLAS"/></testcase>'
        '<testcase classname="a" name="three"><failure message="x"/></testcase></testsuite></testsuites>'
    )
    outcome = majors.read(report, "step", "what it shows")
    assert (outcome.passed, outcome.failed, dict(outcome.skipped)) == (1, ["a::three"], {"no cuBLAS": 1})
    text = majors.table([outcome, majors.read(tmp_path / "none.xml", "other", "nothing")])
    assert "| step | what it shows | 1 | 1 | 1 | 2 |" in text
    assert "| step | no cuBLAS | 1 |" in text
    assert "- step FAILED: a::three" in text and "- other FAILED: the run ended without a report" in text
