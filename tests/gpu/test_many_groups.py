"""More groups than a block counts for itself, by every kernel that a call can take."""

from __future__ import annotations

import oracle
import pytest
import torch
from gpu import kit

import multigemm

G = 5000
FEW = tuple(n % 7 % 3 for n in range(G))
UNEVEN = (700, 0, 65, 64, 1) + (0,) * (G - 8) + (129, 3, 33)
CASES = [
    kit.Case("matrices", FEW, 64, 72, rest=3, bias=True),
    kit.Case("matrices, uneven", UNEVEN, 72, 64, rest=200, offsets=True, index=torch.int32),
    kit.Case("transposed w", UNEVEN, 64, 48, w="transposed"),
    kit.Case("odd places", FEW, 17, 33, x="cut oddly", gy="cut oddly", w="cut oddly"),
    kit.Case("equivariant", UNEVEN, 16, 96, b=3, rest=2),
    kit.Case("equivariant, narrow", UNEVEN, 48, 16, b=3),
    kit.Case("equivariant, tiny matrices", UNEVEN, 4, 4, b=9, rest=70, bias=True),
    kit.Case("shared w", UNEVEN, 16, 24, b=3, rest=1, shared=True, bias=True),
]


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case: kit.Case, dtype: torch.dtype) -> None:
    p = kit.make(case, dtype)
    for where in ("device", "host"):
        for name in (None, "native", "simt"):
            p.check_forward(p.forward(name, where))
            p.check_wgrad(p.wgrad(name, where))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_portable_kernel(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("before Ampere the portable kernels are all there is")
    p = kit.make(CASES[0], dtype)
    for op in ("grouped_mm", "grouped_mm_wgrad"):
        assert "simt" not in p.explain(op).kernel


def test_sizes_are_clamped() -> None:
    """Negative ones, falling offsets and groups past the rows, counted before the kernel runs."""
    groups = 20000
    x = torch.randn(300, 16, device="cuda")
    w = torch.randn(groups, 16, 8, device="cuda")
    values = torch.zeros(groups, dtype=torch.int64)
    values[::1000] = torch.tensor([9, -4, 70, 2**62, 3] * 4)
    for offsets in (False, True):
        keyword = {"offsets" if offsets else "group_sizes": values.cuda()}
        y = multigemm.grouped_mm(x, w, **keyword)
        oracle.assert_close(y, oracle.grouped_mm(x, w, values.tolist(), offsets), torch.float32, 16, 16.0)
        dw = multigemm.grouped_mm_wgrad(x, x, **keyword)
        expected = oracle.grouped_mm_wgrad(x, x, values.tolist(), offsets)
        oracle.assert_close(dw, expected, torch.float32, 300, 16.0)


def test_in_a_graph() -> None:
    """The counting is part of what is captured: sizes may change between replays."""
    x, w = torch.randn(600, 32, device="cuda"), torch.randn(3000, 32, 24, device="cuda")
    sizes = torch.zeros(3000, dtype=torch.int64, device="cuda")
    sizes[5] = 600
    multigemm.grouped_mm(x, w, sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multigemm.grouped_mm(x, w, sizes)
    for group in (5, 1700, 2999):
        sizes.zero_()
        sizes[group], sizes[0] = 400, 100
        graph.replay()
        torch.cuda.synchronize()
        oracle.assert_close(y, oracle.grouped_mm(x, w, sizes.tolist()), torch.float32, 32, 16.0)
