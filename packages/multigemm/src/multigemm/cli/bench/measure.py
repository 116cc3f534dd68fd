"""One row of the results: operands, checks, times, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import multigemm

from .. import _memory
from . import peers, timing
from .cases import Case
from .floor import floor_ms
from .results import Row, dtype_name

# Largest difference from float64 over the largest value. The half precisions round the result to 8 and
# 11 bits; float32 and float64 differ by the order of some thousand additions.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-13}


@dataclass
class Settings:
    device: torch.device
    repeats: int
    budget_s: float
    graph: bool
    implementation: str | None
    tflops: dict[torch.dtype, float] = field(default_factory=dict)
    tbps: float = 1.0


@dataclass
class Outcome:
    """A row, why peers are missing from it, and what is wrong with it (nothing, it is hoped)."""

    row: Row
    refused: dict[str, str]
    faults: list[str]
    graphed: bool


def measure(case: Case, kind: str, sizes: list[int], op: str, dtype: torch.dtype, s: Settings) -> Outcome:
    p = peers.make(case, sizes, dtype, s.device)
    refused: dict[str, str] = {}
    faults: list[str] = []
    tolerance = TOLERANCE[dtype]
    label = f"{case.name}, {kind}, {op}, {dtype_name(dtype)}"

    pin = multigemm.use(s.implementation) if s.implementation else contextlib.nullcontext()
    with pin:
        calls: dict[str, Callable[[], peers.Outputs]] = {"ours": peers.ours(p, op)}
        error = peers.check(p, op, calls["ours"](), zero_tail=True)
        if not error <= tolerance:
            faults.append(f"{label}: ours differs from float64 by {error:.1e}, allowed is {tolerance:.1e}")
        makers = {"torch": peers.torch_grouped_mm}
        if peers.triton_is_there(s.device):
            makers["triton"] = peers.triton_grouped_mm
        for name, make in makers.items():
            found = make(p, op)
            if isinstance(found, str):
                refused[name] = found
            else:
                calls[name] = found
        ways = peers.loops(p, op)
        calls["loop"] = ways[timing.fastest(s.device, ways) if len(ways) > 1 else next(iter(ways))]
        for name in [n for n in calls if n != "ours"]:
            other = peers.check(p, op, calls[name](), zero_tail=False)
            if not other <= tolerance:  # a wrong peer is no peer
                del calls[name]
                refused[name] = f"wrong values: differs from float64 by {other:.1e}"
        # Autograd runs on the stream of the forward pass, which lies outside of a graph's capture.
        graph = s.graph and op != "backward"
        times = timing.side_by_side(s.device, calls, s.repeats, s.budget_s, graph)
        peak = _memory.peak_bytes(calls["ours"], s.device)
        kernel = _kernel(p, op, s.implementation)
        host = _host_us(p, op, s.device, calls["ours"])
    row = Row(
        case=case.name,
        sizes=kind,
        op=op,
        dtype=dtype_name(dtype),
        kernel=kernel,
        floor_ms=floor_ms(case, sizes, op, dtype, s.tflops[dtype], s.tbps),
        ours_ms=times["ours"].ms,
        peers={name: times[name].ms if name in times else None for name in (*makers, "loop")},
        rel_err=error,
        host_us=host,
        peak_bytes=peak,
    )
    return Outcome(row, refused, faults, times["ours"].graphed)


def _kernel(p: peers.Problem, op: str, implementation: str | None) -> str:
    """Implementation and kernel, as ``explain`` tells them; of both products of a backward pass."""
    forward = multigemm.explain(
        p.gy if op == "backward" else p.x,
        p.w.mT if op == "backward" else p.w,
        p.group_sizes,
        implementation=implementation,
    )
    names = [f"{forward.implementation}: {forward.kernel}"] if op != "wgrad" else []
    if op != "forward":
        wgrad = multigemm.explain(
            p.x, p.gy, p.group_sizes, op="grouped_mm_wgrad", implementation=implementation
        )
        names.append(f"{wgrad.implementation}: {wgrad.kernel}")
    return " + ".join(dict.fromkeys(names))


def _host_us(
    p: peers.Problem, op: str, device: torch.device, call: Callable[[], peers.Outputs]
) -> float | None:
    """Host time of a call. On the CPU, where a call returns when its work is done: that of the same call
    with one row and one matrix of a single element, which has next to no work."""
    if device.type != "cpu":
        return timing.host_us(device, call, 20)
    tiny = Case("tiny", p.case.group, 1, 1, 1, 1, None if p.case.B is None else 1)
    return timing.host_us(device, peers.ours(peers.make(tiny, [1], p.x.dtype, device), op))
