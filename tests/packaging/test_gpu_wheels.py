"""What holds of every GPU wheel beside a PyTorch for the CPU: installed by mistake, or for diagnosis.

Public reports behind the cases: a backend for another PyTorch
(https://github.com/NVIDIA/cuEquivariance/issues/193), a namespace registered twice
(https://github.com/metatensor/metatensor/issues/871).
"""

import json
import subprocess
import sys

import pytest
import torch
from loading_kit import Wheel, run_here

WHEELS = [Wheel("cu12"), Wheel("cu13"), Wheel("rocm")]
pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="this PyTorch is for a GPU"
)


@pytest.fixture(params=WHEELS, ids=[wheel.name for wheel in WHEELS])
def wheel(request):
    if not request.param.installed:
        pytest.skip(f"multigemm-{request.param.name} is not installed")
    return request.param


def test_doctor_refuses_it_and_the_cpu_goes_on(wheel):
    done = subprocess.run(
        [sys.executable, "-m", "multigemm", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    [entry] = [entry for entry in report["backends"] if entry["backend"] == wheel.name]
    assert (entry["verdict"], entry["opened"]) == ("refused", False)
    assert "has no GPU support" in entry["reason"]
    assert report["healthy"] and done.returncode == 0


def test_its_structs_are_the_fronts(wheel):
    code = f"""{wheel.open}
from multigemm import _abi
theirs = _abi.Library(handle, {wheel.name!r}).struct_sizes()
show(theirs=theirs, ours=[ctypes.sizeof(struct) for struct in _abi.STRUCTS])
"""
    shown = run_here(code)
    assert shown["theirs"] == shown["ours"]


def test_its_registration_does_no_harm(wheel):
    code = f"""
import torch, multigemm
torch.ops.load_library({wheel.binding!r})
x, w = torch.ones(3, 2), torch.ones(2, 2, 4)
show(y=multigemm.grouped_mm(x, w, torch.tensor([1, 2])).unique().tolist())
"""
    assert run_here(code)["y"] == [2.0]
