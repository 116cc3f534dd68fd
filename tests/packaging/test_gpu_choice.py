"""Which kernel a call on a GPU takes, as a table: a pure function, asked for devices that are not there."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from multigemm import _abi, _discovery, _opening, _resolution

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("multigemm_cu13") is None, reason="multigemm-cu13 is not installed"
)


class Device(ctypes.Structure):
    """``mg_device`` of abi.h."""

    _fields_ = [
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("l2_bytes", ctypes.c_int64),
    ]


HOPPER = Device(9, 0, 132, 232448, 50 << 20)
AMPERE = Device(8, 0, 108, 166912, 40 << 20)
TURING = Device(7, 5, 40, 65536, 4 << 20)


@dataclass
class Call:
    """x [N,(B,)K], w [G,(B,)K,M] or gy [N,(B,)M]; meta tensors, so that only numbers are there."""

    N: int = 8192
    G: int = 8
    K: int = 1024
    M: int = 2048
    B: int | None = None
    dtype: torch.dtype = torch.bfloat16
    wgrad: bool = False
    expanded: bool = False
    shared: bool = False
    on_host: bool = False
    implementation: str = ""
    precision: str = ""


@pytest.fixture(scope="module")
def plan() -> Any:
    return planner("cu13")


def planner(name: str) -> Any:
    """What an installed backend says of a call on a device."""
    [candidate] = [c for c in _discovery.installed() if c.name == name]
    backend = _opening.open_core(candidate, _resolution._front(), [])
    library = _abi.Library(backend.handle, name)

    def ask(call: Call, device: Device) -> dict[str, Any]:
        batch = () if call.B is None else (call.B,)
        x = torch.empty(call.N, *batch, call.K, dtype=call.dtype, device="meta")
        gy = torch.empty(call.N, *batch, call.M, dtype=call.dtype, device="meta")
        if call.expanded:
            gy = gy[:1, ..., :1].expand(gy.shape)
        matrices = () if call.B is None else (1 if call.shared else call.B,)
        w = torch.empty(call.G, *matrices, call.K, call.M, dtype=call.dtype, device="meta")
        groups = torch.full((call.G,), call.N // call.G, dtype=torch.int64)
        if call.wgrad:
            problem: Any = _abi.grouped_mm_wgrad_problem(
                x, gy, groups, False, call.shared, w, "", call.implementation
            )
        elif call.expanded:  # the gradient of x: gy times the transposed matrices
            problem = _abi.grouped_mm_problem(gy, w.mT, groups, False, None, x, "", call.implementation)
        else:
            problem = _abi.grouped_mm_problem(x, w, groups, False, None, gy, "", call.implementation)
        for operand in ("x", "gy", "w", "out"):  # addresses such as an allocator gives
            if hasattr(problem, operand):
                setattr(problem, operand, 1 << 20)
        problem.groups.flags = 2 if call.on_host else 0
        problem.precision = _abi.PRECISIONS[call.precision]
        function = getattr(backend.handle, f"mg_grouped_mm{'_wgrad' if call.wgrad else ''}_plan_{name}")
        function.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        text, length = ctypes.create_string_buffer(1 << 16), ctypes.c_int64()
        status = function(ctypes.byref(problem), ctypes.byref(device), text, len(text), ctypes.byref(length))
        if status != _abi.OK:
            return {"error": library.last_error()}
        return dict(json.loads(text.value))

    return ask


TABLE = [
    (Call(), HOPPER, "rows_sm90"),
    (Call(), AMPERE, "rows_sm80"),
    (Call(), TURING, "rows_simt"),
    (Call(dtype=torch.float16), HOPPER, "rows_sm90"),
    (Call(dtype=torch.float32), HOPPER, "rows_sm80"),
    (Call(dtype=torch.float64, B=16, K=16, M=64), HOPPER, "rows_sm80"),
    (Call(G=2000), HOPPER, "rows_sm80"),  # more groups than a block counts
    (Call(G=20000, N=40000), AMPERE, "rows_sm80"),
    (Call(G=20000, N=40000, wgrad=True), HOPPER, "wgrad_sm90"),
    (Call(G=20000, N=40000, wgrad=True), AMPERE, "wgrad_sm80"),
    (Call(B=4, shared=True), HOPPER, "rows_sm90"),  # entries of B are rows
    (Call(dtype=torch.float32, on_host=True, N=65536, K=4096, M=4096), HOPPER, "blas"),
    (Call(dtype=torch.float32, N=65536, K=4096, M=4096), HOPPER, "rows_sm80"),  # no sizes on the host
    (Call(implementation="native"), HOPPER, "rows_sm90"),
    (Call(implementation="simt"), HOPPER, "rows_simt"),
    (Call(implementation="blas"), HOPPER, "blas"),
    (Call(wgrad=True), HOPPER, "wgrad_sm90"),
    (Call(wgrad=True), AMPERE, "wgrad_sm80"),
    (Call(wgrad=True), TURING, "wgrad_simt"),
    (Call(wgrad=True, B=4, shared=True), HOPPER, "wgrad_sm90"),
    (Call(wgrad=True, dtype=torch.float64, B=16, K=16, M=64), HOPPER, "wgrad_sm80"),
]


@pytest.mark.parametrize(("call", "device", "kernel"), TABLE, ids=range(len(TABLE)))
def test_the_kernel(plan: Any, call: Call, device: Device, kernel: str) -> None:
    told = plan(call, device)
    assert told.get("kernel") == kernel, told
    others = {other["kernel"]: other["why_not"] for other in told["others"]}
    assert len(others) == 4 and kernel not in others and all(others.values())


@pytest.mark.parametrize("wgrad", [False, True], ids=["the gradient of x", "the gradient of w"])
def test_an_expanded_gradient_is_copied_first(plan: Any, wgrad: bool) -> None:
    """As of ``y.sum().backward()``: all of gy is one number."""
    told = plan(Call(wgrad=wgrad, expanded=True), HOPPER)
    assert told["kernel"] == ("wgrad_sm90" if wgrad else "rows_sm90")
    assert ("gy" if wgrad else "x") + " is copied first" in told["why"]


def test_what_was_asked_for_and_cannot_be(plan: Any) -> None:
    error = plan(Call(implementation="torch"), HOPPER)["error"]
    assert error.startswith("MG_UNSUPPORTED") and "lends no matrix product" in error


def test_sizes_that_are_read_back_are_told(plan: Any) -> None:
    assert "synchronises" in plan(Call(implementation="blas"), HOPPER)["why"]
    assert "synchronises" not in plan(Call(implementation="blas", on_host=True), HOPPER)["why"]


@pytest.mark.parametrize(
    ("call", "cuts"),
    [
        (Call(wgrad=True, dtype=torch.float32, N=20000, G=89, K=128, M=128), True),
        (Call(wgrad=True, dtype=torch.float64, N=20000, G=89, K=4, M=4, B=128), True),
        (Call(wgrad=True, dtype=torch.float32, N=20000, G=89, K=2048, M=2048), False),  # tiles enough
        (Call(wgrad=True, dtype=torch.float32, N=200, G=4, K=128, M=128), False),
        (Call(wgrad=True, dtype=torch.float32, N=20000, G=2000, K=128, M=128), False),
        (Call(dtype=torch.float32, N=20000, G=89, K=128, M=128), False),
    ],
)
def test_a_second_launch_for_tall_groups_is_told(plan: Any, call: Call, cuts: bool) -> None:
    told = plan(call, HOPPER)
    assert told["kernel"] == ("wgrad_sm80" if call.wgrad else "rows_sm80")
    assert ("a second launch" in told["why"]) == cuts


def test_more_rows_take_longer(plan: Any) -> None:
    def microseconds(rows: int) -> float:
        return float(plan(Call(N=rows), HOPPER)["why"].split()[3])

    assert microseconds(4096) < microseconds(65536)
