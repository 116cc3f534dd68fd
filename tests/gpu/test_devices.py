"""The device is the tensors'; sizes may be on the host; a forked child is told; errors leave no trace."""

from __future__ import annotations

import subprocess
import sys

import oracle
import pytest
import torch
from gpu import kit

import multigemm
from multigemm import errors
from multigemm.cli.bench import timing

SLOW = 200_000_000


@pytest.mark.two_gpus
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_tensors_of_another_device_than_the_current_one(
    name: str | None, dtype: torch.dtype, where: str
) -> None:
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    case = kit.CASES[1]
    p = kit.make(case, dtype, other)
    y, dw = p.forward(name, where), p.wgrad(name, where)
    assert y.device == dw.device == other and torch.cuda.current_device() == 0
    here = kit.make(case, dtype, "cuda:0")  # another generator: the values are checked by themselves
    sizes = list(case.sizes)
    for q, (result, weights) in ((p, (y, dw)), (here, (here.forward(name, where), here.wgrad(name, where)))):
        oracle.assert_close(result, oracle.grouped_mm(q.x, q.w, sizes, False, q.bias), dtype, case.k, 16.0)
        oracle.assert_close(weights, oracle.grouped_mm_wgrad(q.x, q.gy, sizes), dtype, max(sizes), 16.0)
    assert multigemm.explain(p.x, p.w, p.groups, implementation=name).device == "cuda:1"


@pytest.mark.two_gpus
def test_the_stream_is_that_of_the_tensors_device() -> None:
    p = kit.make(kit.CASES[1], torch.float64, "cuda:1")
    expected = p.forward(), p.wgrad()
    ready = p.x.clone()
    p.x.zero_()
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):  # makes device 1 current ...
        torch.cuda._sleep(SLOW)
        p.x.copy_(ready)
        with torch.cuda.device(0):  # ... and here it is not, while its current stream is still the side one
            found = p.forward(), p.wgrad()
            assert torch.cuda.current_device() == 0
    side.synchronize()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.two_gpus
def test_the_backward_pass_on_another_device() -> None:
    p = kit.make(kit.CASES[1], torch.float64, "cuda:1")
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    multigemm.grouped_mm(x, w, p.groups).backward(p.gy)
    sizes = list(p.case.sizes)
    oracle.assert_close(x.grad, oracle.grouped_mm(p.gy, w.mT, sizes), torch.float64, p.case.m, 16.0)
    oracle.assert_close(w.grad, oracle.grouped_mm_wgrad(x, p.gy, sizes), torch.float64, max(sizes), 16.0)
    assert torch.cuda.current_device() == 0


@pytest.mark.two_gpus
def test_operands_of_two_devices_are_refused() -> None:
    x, w = torch.ones(4, 8, device="cuda:1"), torch.ones(2, 8, 8, device="cuda:1")
    sizes = torch.tensor([1, 3], device="cuda:1")
    with pytest.raises(errors.DeviceError, match="w must be on the device of x, cuda:1, got cuda:0"):
        multigemm.grouped_mm(x, w.to("cuda:0"), sizes)
    with pytest.raises(
        errors.DeviceError, match="group_sizes must be on the device of x, cuda:1, or on the CPU"
    ):
        multigemm.grouped_mm(x, w, sizes.to("cuda:0"))
    with pytest.raises(errors.DeviceError, match="out must be on the device of x, cuda:1, got cuda:0"):
        multigemm.grouped_mm(x, w, sizes, out=torch.ones(4, 8, device="cuda:0"))
    assert torch.cuda.current_device() == 0


def test_operands_of_the_host_are_refused() -> None:
    x, w = torch.ones(4, 8, device="cuda"), torch.ones(2, 8, 8)
    with pytest.raises(errors.DeviceError, match="w must be on the device of x, cuda:0, got cpu"):
        multigemm.grouped_mm(x, w, [1, 3])
    with pytest.raises(
        errors.DeviceError, match="group_sizes must be on the device of x, cpu, or on the CPU, got cuda:0"
    ):
        multigemm.grouped_mm(x.cpu(), w, torch.tensor([1, 3], device="cuda"))


# --- sizes on the host --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_sizes_on_the_host(name: str | None, dtype: torch.dtype) -> None:
    p = kit.make(kit.CASES[1], dtype)
    sizes = torch.tensor(p.case.sizes)
    strided = torch.stack([sizes, sizes + 99], 1)[:, 0]
    given = [
        {"group_sizes": p.case.sizes},
        {"group_sizes": sizes.to(torch.int32)},
        {"group_sizes": strided},
        {"group_sizes": sizes.pin_memory()},
        {"offsets": sizes.cumsum(0)},
        {"offsets": sizes.cumsum(0).to(torch.int32)},
    ]
    for keyword in given:
        p.check_forward(multigemm.grouped_mm(p.x, p.w, **keyword, bias=p.bias, implementation=name))
        p.check_wgrad(multigemm.grouped_mm_wgrad(p.x, p.gy, **keyword, implementation=name))


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", [None, "native", "simt", "blas"])
def test_sizes_on_the_host_may_change_after_the_call(name: str | None, pinned: bool) -> None:
    """The device is still busy when the call returns; what it will need was taken during the call."""
    p = kit.make(kit.CASES[1], torch.float32)
    sizes = torch.tensor(p.case.sizes)
    sizes = sizes.pin_memory() if pinned else sizes
    torch.cuda._sleep(SLOW)
    y = multigemm.grouped_mm(p.x, p.w, sizes, bias=p.bias, implementation=name)
    dw = multigemm.grouped_mm_wgrad(p.x, p.gy, sizes, implementation=name)
    sizes.fill_(1)
    p.check_forward(y)
    p.check_wgrad(dw)


def test_sizes_on_the_host_with_gradients_and_autocast() -> None:
    p = kit.make(kit.CASES[0], torch.float32)
    sizes = torch.tensor(p.case.sizes)
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    found = torch.autograd.grad(multigemm.grouped_mm(x, w, sizes), (x, w), p.gy)
    expected = torch.autograd.grad(multigemm.grouped_mm(x, w, p.groups), (x, w), p.gy)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        assert multigemm.grouped_mm(x, w, sizes).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert multigemm.grouped_mm(x, w, sizes).dtype == torch.float32


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_wrong_sizes_are_refused_where_checks_are_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    x, w = torch.ones(5, 8, device="cuda"), torch.ones(3, 8, 8, device="cuda")
    for keyword, text in (
        ({"group_sizes": [2, -1, 1]}, r"group_sizes must not be negative, got group_sizes\[1\] = -1"),
        ({"group_sizes": [2, 9, 1]}, r"got 11 rows up to and with group_sizes\[1\] = 9"),
        ({"offsets": [3, 2, 4]}, r"offsets must not fall, got offsets\[1\] = 2 after 3"),
    ):
        value = {name: torch.tensor(values, device=where) for name, values in keyword.items()}
        with pytest.raises(errors.GroupSizesError, match=text):
            multigemm.grouped_mm(x, w, **value)
        with pytest.raises(errors.GroupSizesError, match=text):
            multigemm.grouped_mm_wgrad(x, x, **value)


@pytest.mark.blas
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_native_failure_is_told_with_its_facts() -> None:
    x, w = torch.ones(5, 8, device="cuda"), torch.ones(2, 8, 8, device="cuda")
    sizes = torch.tensor([2, 3], device="cuda")
    with pytest.raises(errors.NativeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        multigemm.grouped_mm(x, w, sizes, implementation="blas")
    error = caught.value
    assert error.status == "MG_UNSUPPORTED" and error.device == "cuda:0" and error.stream is not None
    assert error.shapes["x"] == (5, 8)
    assert isinstance(error, RuntimeError) and "a graph is being captured" in str(error)


FORK = """
import os, sys, torch, multigemm
x, w = torch.ones(4, 8, device="cuda"), torch.ones(2, 8, 8, device="cuda")
s = torch.tensor([1, 3], device="cuda")
multigemm.grouped_mm(x, w, s)
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    code = 3
    try:
        for call in (lambda: multigemm.grouped_mm(x, w, s), lambda: multigemm.grouped_mm_wgrad(x, x, s)):
            try:
                call()
                print("no error")
            except multigemm.errors.BackendError as error:
                print(error)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("parent", float(multigemm.grouped_mm(x, w, s).sum()))
"""


def test_a_forked_child_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("this process was forked after backend") == 2, done.stdout
    assert "'spawn' or 'forkserver'" in done.stdout
    assert "no error" not in done.stdout and "parent 256.0" in done.stdout


def test_no_bytes_are_kept_between_calls() -> None:
    p = kit.make(kit.CASES[5], torch.bfloat16)
    for name in (None, "native", "simt"):
        p.forward(name), p.wgrad(name)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            p.forward(name), p.wgrad(name)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_host_time_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, as machines differ: microseconds until a call returns, beside torch's own."""
    x = torch.randn(64, 256, device="cuda").bfloat16()
    w = torch.randn(8, 256, 256, device="cuda").bfloat16()
    sizes = torch.full((8,), 8, device="cuda")
    ends = sizes.cumsum(0).to(torch.int32)
    calls = {
        "grouped_mm": lambda: multigemm.grouped_mm(x, w, sizes),
        "grouped_mm, sizes on the host": lambda: multigemm.grouped_mm(x, w, [8] * 8),
        "grouped_mm_wgrad": lambda: multigemm.grouped_mm_wgrad(x, x, sizes),
        "torch's grouped_mm": lambda: torch.nn.functional.grouped_mm(x, w, offs=ends),
        "torch.mm": lambda: torch.mm(x, w[0]),
    }
    with torch.inference_mode():
        found = {name: timing.host_us(x.device, call) for name, call in calls.items()}
    with capsys.disabled():
        print("\nhost time in microseconds: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()))
    assert all(value > 0 for value in found.values())
