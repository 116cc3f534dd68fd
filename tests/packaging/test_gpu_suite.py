"""ci/gpu_tests.py on a machine that cannot run a wheel for AMD says why, instead of a suite that fails."""

import pytest
from loading_kit import ci_script

ROCM = {"kind": "rocm", "major": 7, "architectures": ["gfx90a", "gfx942"]}


@pytest.mark.parametrize(
    ("hip", "cuda", "gpu", "text"),
    [
        (None, None, "", "needs a PyTorch for ROCm 7, this one is for the CPU"),
        (None, "13.0", "sm_90", "needs a PyTorch for ROCm 7, this one is for CUDA 13.0"),
        ("6.4.43482", None, "gfx942", "is for ROCm 7, this PyTorch for 6.4.43482"),
        ("7.1.25424", None, "", "needs a GPU that PyTorch sees"),
        ("7.1.25424", None, "gfx1100", "has code for gfx90a, gfx942, this GPU is a gfx1100"),
    ],
)
def test_what_is_missing_is_told(hip, cuda, gpu, text):
    assert text in ci_script("gpu_tests").unfit(ROCM, hip, cuda, gpu)


@pytest.mark.parametrize("gpu", ROCM["architectures"])
def test_a_machine_that_fits(gpu):
    # ROCm's PyTorch may tell a CUDA version as well.
    assert ci_script("gpu_tests").unfit(ROCM, "7.2.53211", "12.8", gpu) == ""


def test_other_backends_are_not_asked():
    assert ci_script("gpu_tests").unfit({"kind": "cuda"}, None, "13.0", "sm_90") == ""


@pytest.mark.parametrize(
    ("hip", "cuda", "name"), [("7.1.25424", "12.8", "rocm"), (None, "13.0", "cu13"), (None, "12.9", "cu12")]
)
def test_the_backend_of_a_pytorch(monkeypatch, hip, cuda, name):
    script = ci_script("gpu_tests")
    monkeypatch.setattr(script, "ask", lambda python: (hip, cuda, ""))
    assert script.own_backend("python3") == name


def test_a_pytorch_without_gpus_has_none(monkeypatch):
    script = ci_script("gpu_tests")
    monkeypatch.setattr(script, "ask", lambda python: (None, None, ""))
    with pytest.raises(SystemExit, match="is for the CPU: --gpus needs one for GPUs"):
        script.own_backend("python3")


def test_an_interpreter_without_pytorch_is_told():
    with pytest.raises(SystemExit, match="cannot import PyTorch"):
        ci_script("gpu_tests").ask("false")
