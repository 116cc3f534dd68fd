"""Timing calls side by side. The only file of the benchmark that knows device events and graphs.

Calls are sampled in turns, one sample of each, the order rotated, so that a machine that becomes slower
or faster meanwhile does so for all of them; the median of each is returned. A sample holds as many calls
as fill a few milliseconds. On the CPU the clock is ``perf_counter``; on a GPU device events around the
calls, or around replays of a graph of them, queued behind a busy device, so that host time does not count
where it can be hidden.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]

SAMPLE_S = 2e-3
MIN_REPEATS = 3
MOST_AHEAD_S = 60e-3
CYCLES_PER_S = 2e9  # of a GPU's clock, rather too many than too few


@dataclass(frozen=True)
class Timed:
    """Median milliseconds, the number of samples, and whether a graph was replayed."""

    ms: float
    samples: int
    graphed: bool = False


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, as the caching allocator of a GPU does; True if it obeys.

    By default glibc maps a large output anew at every call, and the page faults take several times as
    long as the product: every implementation would look alike. Known to glibc only.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))


class CPUTimer:
    graphed = False

    def prepare(self, call: Call) -> Call:
        call()
        return call

    def seconds(self, call: Call, count: int) -> float:
        """Of one call, the mean of ``count`` calls in a row."""
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count


class WallTimer(CPUTimer):
    """For what somebody waits for who calls, and then needs the result: host time and device time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, call: Call) -> Call:
        for _ in range(3):
            call()
        torch.accelerator.synchronize(self.device)
        return call

    def seconds(self, call: Call, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
            torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - start) / count


class DeviceTimer:
    """For a device with streams and events."""

    def __init__(self, device: torch.device, graph: bool) -> None:
        self.device, self.graph, self.graphed = device, graph and device.type == "cuda", False
        self.ahead: dict[Call, float] = {}

    def prepare(self, call: Call) -> Call:
        """A warmed-up call, or the replay of its graph where it can be captured."""
        self.graphed = False
        with self._current():
            for _ in range(3):
                call()
            torch.accelerator.synchronize(self.device)
            ready = self._captured(call) if self.graph else call
            start = time.perf_counter()
            ready()
            # As long as the host takes to queue a call, the device is kept busy before each sample.
            self.ahead[ready] = time.perf_counter() - start
            torch.accelerator.synchronize(self.device)
        return ready

    def _captured(self, call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:  # a call that synchronises cannot be captured
            torch.accelerator.synchronize(self.device)
            _leave_capture(self.device)
            return call
        graph.replay()
        self.graphed = True
        return graph.replay

    def seconds(self, call: Call, count: int) -> float:
        """Of one call, the mean of ``count`` calls in a row, in the device's own time."""
        start = torch.Event(self.device, enable_timing=True)
        end = torch.Event(self.device, enable_timing=True)
        with self._current():
            if self.device.type == "cuda":
                # Calls queue up behind this, so that gaps between launches are not measured as theirs.
                wait = min(count * self.ahead.get(call, 0.0), MOST_AHEAD_S)
                torch.cuda._sleep(int(1.5 * wait * CYCLES_PER_S))
            start.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / count

    def _current(self) -> AbstractContextManager[object]:
        """The device as the current one: events, graphs and the sleep belong to the current device."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.device(self.device)


def _leave_capture(device: torch.device) -> None:
    """Give the device's generator a state of its own again: after a capture that failed, PyTorch (2.11) still
    counts its random numbers as that graph's, and refuses to draw any more."""
    index = torch.cuda.current_device() if device.index is None else device.index
    fresh = torch.Generator(device)
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


def timer(device: torch.device, graph: bool = False) -> CPUTimer | DeviceTimer:
    return CPUTimer() if device.type == "cpu" else DeviceTimer(device, graph)


def side_by_side(
    device: torch.device,
    calls: Mapping[str, Call],
    repeats: int,
    budget_s: float = float("inf"),
    graph: bool = False,
    wall: bool = False,
) -> dict[str, Timed]:
    """Median time of each call, sampled in turns; at least 3 samples, then until the budget is spent.

    On a GPU the device's own time, or with ``wall`` the time until the result is there.
    """
    clock = WallTimer(device) if wall and device.type != "cpu" else timer(device, graph)
    names = list(calls)
    ready: dict[str, Call] = {}
    graphed: dict[str, bool] = {}
    counts: dict[str, int] = {}
    for name in names:
        ready[name] = clock.prepare(calls[name])
        graphed[name] = clock.graphed
        # The least of three: one that an interruption has made longer would leave samples too short.
        once = min(clock.seconds(ready[name], 1) for _ in range(3))
        counts[name] = max(1, min(1000, int(SAMPLE_S / max(once, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # a turn that does not count: clocks and caches settle
        clock.seconds(ready[name], counts[name])
    begin = time.perf_counter()
    for turn in range(repeats):
        if turn >= MIN_REPEATS and time.perf_counter() - begin > budget_s:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(clock.seconds(ready[name], counts[name]))
    return {
        name: Timed(statistics.median(values) * 1e3, len(values), graphed[name])
        for name, values in samples.items()
    }


def fastest(device: torch.device, calls: Mapping[str, Call]) -> str:
    """The name of the fastest call, from a few samples: to choose between two ways to write a peer."""
    times = side_by_side(device, calls, 3)
    return min(times, key=lambda name: times[name].ms)


def host_us(device: torch.device, call: Call, count: int = 200) -> float:
    """Microseconds until the call returns to Python, not waiting for the device: the best of five rounds."""
    for _ in range(10):
        call()
    rounds = []
    for _ in range(5):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - start) / count)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return min(rounds) * 1e6


def ceilings(device: torch.device, dtypes: list[torch.dtype]) -> tuple[dict[torch.dtype, float], float]:
    """F by dtype in TFLOP/s from a dense product, and W in TB/s from a copy, reads and writes counted.

    8192^3 and 2 GiB on a GPU; on the CPU 1536^3 (512^3 for the half precisions) and 256 MiB.
    """
    cpu = device.type == "cpu"
    rates = {}
    for dtype in dtypes:
        n = 8192
        if cpu:
            n = 512 if dtype.itemsize == 2 else 1536
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates[dtype] = 2 * n**3 / _best(device, partial(torch.mm, a, b, out=out)) * 1e-12
    source = torch.ones(2**28 if cpu else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return rates, 2 * source.numel() / _best(device, lambda: target.copy_(source)) * 1e-12


def _best(device: torch.device, call: Call) -> float:
    clock = timer(device)
    ready = clock.prepare(call)
    return min(clock.seconds(ready, 1) for _ in range(7))
