"""The floor of a case: no implementation can be faster than the arithmetic or the memory traffic allow.

    floor = max(FLOPs / F, bytes / W)

Each input is read once (only the weights of groups that have rows, only the rows that have a group),
each output is written once, empty places included. F and W are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cases import Case

OPS = ("forward", "wgrad", "backward")


def flops(case: Case, sizes: Sequence[int], op: str) -> int:
    """Multiplications and additions; the backward pass makes two products."""
    one = 2 * sum(sizes) * (case.B or 1) * case.K * case.M
    return 2 * one if op == "backward" else one


def traffic(case: Case, sizes: Sequence[int], op: str, dtype: torch.dtype) -> int:
    """Bytes that must cross the memory bus."""
    batch = case.B or 1
    rows, present = sum(sizes), sum(1 for n in sizes if n)
    x_read, gy_read = rows * batch * case.K, rows * batch * case.M
    weights_read, weights_written = (n * batch * case.K * case.M for n in (present, case.G))
    elements = {
        "forward": x_read + weights_read + case.N * batch * case.M,
        "wgrad": x_read + gy_read + weights_written,
        "backward": x_read + gy_read + weights_read + case.N * batch * case.K + weights_written,
    }[op]
    return elements * dtype.itemsize


def floor_ms(
    case: Case, sizes: Sequence[int], op: str, dtype: torch.dtype, tflops: float, tbps: float
) -> float:
    """Milliseconds; ``tflops`` in 10^12 operations per second, ``tbps`` in 10^12 bytes per second."""
    return 1e3 * max(
        flops(case, sizes, op) / (tflops * 1e12), traffic(case, sizes, op, dtype) / (tbps * 1e12)
    )
