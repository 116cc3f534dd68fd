"""Which kernel a call on an AMD GPU takes, as a table: a pure function, asked for devices that are not there.

The wheel opens without ROCm, so hipBLAS counts as there: whether it is, is asked only where a device is.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from test_gpu_choice import Call, Device, planner

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("multigemm_rocm") is None, reason="multigemm-rocm is not installed"
)

MI250X = Device(9, 0, 110, 65536, 8 << 20)  # one of its two halves, gfx90a
MI300X = Device(9, 4, 304, 65536, 4 << 20)  # gfx942
RADEON = Device(11, 0, 96, 65536, 6 << 20)  # gfx1100, which has other matrix instructions
BIG = {"N": 65536, "K": 4096, "M": 4096}

TABLE = [
    (Call(), MI300X, "rows_mfma"),
    (Call(), MI250X, "rows_mfma"),
    (Call(), RADEON, "rows_simt"),
    (Call(dtype=torch.float16), MI250X, "rows_mfma"),
    (Call(dtype=torch.float32), MI250X, "rows_mfma"),
    (Call(dtype=torch.float64, B=16, K=16, M=64), MI300X, "rows_mfma"),
    (Call(G=20000, N=40000), MI300X, "rows_mfma"),
    (Call(B=4, shared=True), MI300X, "rows_mfma"),
    (Call(dtype=torch.float32, on_host=True, **BIG), MI300X, "blas"),
    (Call(dtype=torch.float32, **BIG), MI300X, "rows_mfma"),  # no sizes on the host
    # hipBLAS never takes TF32: where it is allowed, gfx942's own instruction is faster, and gfx90a has none.
    (Call(dtype=torch.float32, on_host=True, precision="tf32", **BIG), MI300X, "rows_mfma"),
    (Call(dtype=torch.float32, on_host=True, precision="tf32", **BIG), MI250X, "blas"),
    (Call(implementation="native"), MI300X, "rows_mfma"),
    (Call(implementation="native"), RADEON, "rows_simt"),
    (Call(implementation="simt"), MI300X, "rows_simt"),
    (Call(implementation="blas"), MI300X, "blas"),
    (Call(wgrad=True), MI300X, "wgrad_mfma"),
    (Call(wgrad=True), MI250X, "wgrad_mfma"),
    (Call(wgrad=True), RADEON, "wgrad_simt"),
    (Call(wgrad=True, B=4, shared=True), MI300X, "wgrad_mfma"),
    (Call(wgrad=True, dtype=torch.float64, B=16, K=16, M=64), MI250X, "wgrad_mfma"),
]


@pytest.fixture(scope="module")
def plan() -> Any:
    return planner("rocm")


@pytest.mark.parametrize(("call", "device", "kernel"), TABLE, ids=range(len(TABLE)))
def test_the_kernel(plan: Any, call: Call, device: Device, kernel: str) -> None:
    told = plan(call, device)
    assert told.get("kernel") == kernel, told
    others = {other["kernel"]: other["why_not"] for other in told["others"]}
    assert len(others) == 3 and kernel not in others and all(others.values())


@pytest.mark.parametrize("wgrad", [False, True], ids=["the gradient of x", "the gradient of w"])
def test_an_expanded_gradient_is_copied_first(plan: Any, wgrad: bool) -> None:
    told = plan(Call(wgrad=wgrad, expanded=True), MI300X)
    assert told["kernel"] == ("wgrad_mfma" if wgrad else "rows_mfma")
    assert ("gy" if wgrad else "x") + " is copied first" in told["why"]


def test_other_chips_are_told_what_is_needed(plan: Any) -> None:
    others = {other["kernel"]: other["why_not"] for other in plan(Call(), RADEON)["others"]}
    assert others["rows_mfma"] == "needs a gfx90a or gfx942"


def test_the_larger_chip_is_faster(plan: Any) -> None:
    def microseconds(device: Device, call: Call) -> float:
        return float(plan(call, device)["why"].split()[3])

    assert microseconds(MI300X, Call(N=65536)) < microseconds(MI250X, Call(N=65536))
    assert microseconds(MI300X, Call(N=4096)) < microseconds(MI300X, Call(N=65536))
