"""Runs every kernel once over small odd shapes, for compute-sanitizer; checks values too.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py native simt
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py

Outputs are lent full of NaN: what a kernel leaves out shows in the values. initcheck does not see what the
copy engine writes, so without that it would take the outputs of Hopper's weight gradient for unwritten.

Arguments are implementations, by default native, simt and blas. PyTorch's caching allocator is turned off,
so that each tensor is an allocation of its own, whose bounds the tool knows. Takes some seconds without
the tool.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu import kit

CASES = [
    kit.Case("aligned", (70, 0, 33), 64, 136, rest=5, bias=True),
    kit.Case("aligned, transposed w", (70, 0, 33), 136, 64, w="transposed", offsets=True, index=torch.int32),
    kit.Case("odd", (65, 0, 30), 37, 19, rest=2, bias=True),
    kit.Case("odd address", (65, 0, 30), 40, 24, x="unaligned", w="unaligned", gy="unaligned"),
    kit.Case("cut", (9, 0, 140), 48, 40, x="cut", gy="cut", w="cut"),
    kit.Case("stepped", (9, 40), 24, 40, x="stepped", gy="stepped"),
    kit.Case("expanded", (20, 3), 32, 32, x="expanded", gy="scalar"),
    kit.Case("few rows", (1, 0, 2, 1), 264, 72),
    kit.Case("no rows", (0, 0), 16, 16, rest=3, bias=True),
    kit.Case("many groups", tuple(n % 2 for n in range(1100)), 8, 8),
    kit.Case("batch", (20, 0, 7), 16, 24, b=3, rest=1, bias=True),
    kit.Case("batch, shared w", (20, 0, 7), 16, 24, b=3, shared=True, rest=1),
    kit.Case("batch, odd", (20, 7), 5, 3, b=4, x="cut oddly", gy="cut oddly"),
]


def poisoned(shape: torch.Size, p: kit.Operands) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=p.case.out_dtype or p.dtype, device="cuda")


def main() -> int:
    names = sys.argv[1:] or ["native", "simt", "blas"]
    ran = 0
    for case in CASES:
        for dtype in kit.DTYPES:
            p = kit.make(case, dtype)
            for name in names:
                for where in ("device", "host"):
                    p.check_forward(p.forward(name, where, out=poisoned(p.gy.shape, p)))
                    p.check_wgrad(p.wgrad(name, where, out=poisoned(p.w.shape, p)))
                    ran += 2
    torch.cuda.synchronize()
    print(f"{ran} products checked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
