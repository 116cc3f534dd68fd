"""A process that uses device 1 alone: contexts on device 0, as the driver tells. A process for each case."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.two_kit import CONTEXTS, WAYS, Way

pytestmark = pytest.mark.two_gpus

START = (
    CONTEXTS
    + """
import sys, threading, warnings
warnings.simplefilter("ignore")
def only_device_1(what):
    found = contexts()
    assert found[:2] == [0, 1] and not any(found[2:]), f"{what}: contexts {found}"
"""
)
# What PyTorch does by itself comes first, so that its faults are not taken for ours.
TORCH = (
    START
    + """
import torch
x = torch.randn(8, 8).to("cuda:1")
(x @ x).sort().values.cpu()
torch.cuda.synchronize(1)
only_device_1("PyTorch alone")
from gpu.two_kit import Way, check, check_gradients, make
def work(way):
    made = make(way, "cuda:1")
    check(way, made.call())
    check_gradients(way, made.gradients(made.gy))
    only_device_1(way)
"""
)
CALLS = {
    "while device 0 is current": "for way in ways: work(way)",
    "while device 1 is current": "torch.cuda.set_device(1)\nfor way in ways: work(way)",
    "in a thread that has used no device": """
def run():
    for way in ways: work(way)
    done.append(True)
done = []
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert done
""",
    "with captured graphs": """
for way in ways:
    if way.pin in ("blas", "torch"): continue
    made = make(way, "cuda:1")
    with torch.cuda.device(1):
        made.call()
        torch.cuda.synchronize(1)
        side = torch.cuda.Stream(device=1)
        with torch.cuda.stream(side): made.call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side): y = made.call()
        graph.replay()
    torch.cuda.synchronize(1)
    check(way, y)
    only_device_1(way)
""",
}


def run(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout


@pytest.mark.parametrize("calls", CALLS)
def test_no_context_on_the_device_that_is_not_used(calls: str) -> None:
    """Of any way; a context takes some hundred megabytes of a device that others may need."""
    ways = [(way.what, way.pin) for way in WAYS]
    run(f"{TORCH}\nways = [Way(*way) for way in {ways!r}]\n{CALLS[calls]}\nprint('done')")


def test_no_context_by_the_first_call_of_a_thread_into_the_library() -> None:
    """A thread whose first call of any CUDA function is ours, with an output that is there: nobody else has
    made device 1 current for it."""
    way = Way("grouped_mm", "simt")
    run(
        f"""{TORCH}
import multigemm
made = make(Way({way.what!r}, {way.pin!r}), "cuda:1")
x, w, sizes = (t.detach() for t in made.late)
out = torch.full_like(made.gy, float("nan"))
multigemm.grouped_mm(x, w, sizes, implementation="simt")  # the backend is open now
torch.cuda.synchronize(1)
found = []
def run():
    torch.ops.multigemm.native_grouped_mm(x, w, sizes, False, None, out, "", "simt")
    found.append(torch.cuda.current_device())
thread = threading.Thread(target=run)
thread.start()
thread.join()
torch.cuda.synchronize(1)
check(made.way, out)
assert found == [0], found
only_device_1("the thread")
print("done")
"""
    )


def test_no_context_by_cupys_arrays() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    run(
        START
        + """
import cupy
from multigemm import interop
cupy.cuda.Device(1).use()  # `with Device(1)` would make device 0 current again, and a context there
x, w = cupy.ones((6, 8)), cupy.ones((2, 8, 4))
for name in (None, "native", "simt", "blas"):
    for sizes in (cupy.array([2, 3]), [2, 3]):
        y = interop.grouped_mm(x, w, sizes, implementation=name)
        assert float(y.sum()) == 5 * 8 * 4, y
        assert float(interop.grouped_mm_wgrad(x, y, sizes, implementation=name).sum()) == 5 * 8 * 4 * 8
        only_device_1(name)
print("done")
"""
    )


def test_the_pages_example() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "multi-device.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    run(code + "\nprint('done')")


def test_a_mask_renumbers_the_devices() -> None:
    """CUDA_VISIBLE_DEVICES=1: the second GPU is cuda:0, and the first one is not there at all."""
    code = (
        START
        + """
import os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
assert torch.cuda.device_count() == 1
import multigemm
from multigemm import errors
from gpu.two_kit import Way, check, make
for pin in (None, "native", "simt"):
    way = Way("grouped_mm", pin)
    check(way, make(way, "cuda:0").call())
assert multigemm.get_accelerator("cuda").device_count() == 1
assert contexts() == [1]
x, w, sizes = (t.detach() for t in make(Way("grouped_mm"), "cuda:0").late)
assert multigemm.explain(x, w, sizes).device == "cuda:0"
print("done")
"""
    )
    run(code)


def test_a_process_that_sees_no_device_computes_on_the_cpu() -> None:
    code = (
        START
        + """
import os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import multigemm
from gpu.two_kit import Way, check, make
assert not torch.cuda.is_available()
for what in ("grouped_mm", "indexed linear"):
    check(Way(what), make(Way(what), "cpu").call())
print("done")
"""
    )
    run(code)
