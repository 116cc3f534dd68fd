"""The peak of what a call allocates through PyTorch, above what was there before it.

On a GPU: the caching allocator's own high-water mark. On the CPU there is no such counter, so the
profiler's record of every allocation and release is added up. Either way it is PyTorch's allocator that
is watched: scratch that a BLAS library takes from the system is not seen.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Run ``call`` once and return the bytes at its peak, its results included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _profiled(call)


def _profiled(call: Callable[[], object]) -> int:
    # The profiler's library writes a line to stderr at each start; it reads this before its first start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        result = call()
    del result
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        record.export_chrome_trace(path)
        with open(path, encoding="utf-8") as stream:
            events = json.load(stream)["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0]
    memory.sort(key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    peak = current = 0
    for event in memory:
        current += int(event["args"]["Bytes"])
        peak = max(peak, current)
    return peak
