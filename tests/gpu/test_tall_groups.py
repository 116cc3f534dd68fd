"""Weight gradients where one group has most rows: its rows are shared out, in one order at every call."""

from __future__ import annotations

import threading

import oracle
import pytest
import torch
from gpu import kit

import multigemm

SKEW = (20, 0, 3, 2900, 70, 560, 1, 90, 0, 6, 40, 300)
# Entries of B: Hopper has other kernels for halves without.
CASES = [
    kit.Case("tiles", SKEW, 72, 136, b=2, rest=5),
    kit.Case("one group has all rows", (0, 0, 5003, 0, 0), 40, 72, b=2, offsets=True, index=torch.int32),
    kit.Case("odd places", SKEW, 35, 67, b=2, x="cut oddly", gy="cut oddly", w="cut oddly"),
    kit.Case("to float32", SKEW, 64, 64, b=2, out_dtype=torch.float32),
    kit.Case("summed over B", SKEW, 40, 24, b=3, shared=True, x="cut oddly"),
    kit.Case("summed over B, in steps", SKEW, 40, 24, b=3, shared=True, x="transposed"),
    kit.Case("tiny matrices", SKEW, 4, 4, b=40, rest=100),
    kit.Case("odd tiny matrices", SKEW, 5, 3, b=33, x="cut oddly", gy="cut oddly"),
    kit.Case("hundreds of groups", (*(1,) * 240, 3000, *(0,) * 15), 24, 40, b=2),
    kit.Case("a thousand groups, which are not cut", (*(1,) * 1000, 3000, *(0,) * 23), 24, 40, b=2),
    kit.Case("as many rows each", (300,) * 12, 72, 136, b=2),
]


def poison(elements: int, dtype: torch.dtype) -> None:
    """NaN in the memory that the allocator hands out next."""
    held = [torch.full((elements,), float("nan"), dtype=dtype, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_bits(case: kit.Case, dtype: torch.dtype) -> None:
    p = kit.make(case, dtype)
    first = p.wgrad("native")
    p.check_wgrad(first)
    for _ in range(30):
        poison(first.numel(), first.dtype)
        assert torch.equal(p.wgrad("native"), first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_explained(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("before Ampere the portable kernels are all there is")
    cut = kit.make(kit.Case("", (20000 // 89,) * 89, 128, 128), dtype).explain("grouped_mm_wgrad")
    assert cut.kernel.endswith("wgrad_sm80") and "second launch" in str(cut)
    whole = kit.make(kit.Case("", (5,) * 89, 128, 128), dtype).explain("grouped_mm_wgrad")
    assert "second launch" not in str(whole)


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.name)
def test_no_more_memory_than_the_output(case: kit.Case) -> None:
    p = kit.make(case, torch.float32)
    size = p.wgrad("native").nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dw = p.wgrad("native")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * (size + 512)
    assert torch.cuda.memory_allocated() - before <= dw.nbytes + 512


def sizes_for(turn: int, count: int, rows: int) -> list[int]:
    even = [rows // count] * count
    one = [0] * count
    one[turn % count] = rows
    generator = torch.Generator().manual_seed(turn)
    odds = 1.0 / torch.randperm(count, generator=generator).add(1)
    skew = torch.bincount(torch.multinomial(odds, rows, True, generator=generator), minlength=count).tolist()
    return [even, one, skew, [0] * count, [rows, rows, *[1] * (count - 2)], skew][turn % 6]


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6]], ids=lambda case: case.name)
def test_a_graph_is_replayed_with_other_sizes(case: kit.Case, dtype: torch.dtype) -> None:
    p = kit.make(case, dtype)
    count, rows = len(case.sizes), len(p.x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        p.wgrad("native")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [p.wgrad("native") for _ in range(3)]  # one after another: they may share a workspace
    for turn in range(12):
        sizes = sizes_for(turn, count, rows)
        p.groups.copy_(torch.tensor(sizes))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        eager = p.wgrad("native")
        torch.cuda.synchronize()
        assert all(torch.equal(out, eager) for out in outs)
        oracle.assert_close(eager, oracle.grouped_mm_wgrad(p.x, p.gy, sizes), dtype, rows, 16.0)


def test_streams_at_once() -> None:
    problems = [kit.make(case, dtype) for case in CASES[:8] for dtype in (torch.float32, torch.float64)]
    expected = [p.wgrad("native") for p in problems]
    torch.cuda.synchronize()
    barrier, wrong = threading.Barrier(4), []

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(40):
                found = [(i, problems[i].wgrad("native")) for i in range(first, len(problems), 4)]
                wrong.extend(i for i, dw in found if not torch.equal(dw, expected[i]))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_comes_next_waits_for_the_second_launch() -> None:
    """A copy behind each call, and operands that are overwritten at once."""
    p = kit.make(CASES[0], torch.float32)
    expected = p.wgrad("native")
    x, gy = p.x.clone(), p.gy.clone()
    copies = []
    for _ in range(50):
        p.x.copy_(x)
        p.gy.copy_(gy)
        dw = multigemm.grouped_mm_wgrad(p.x, p.gy, p.groups, implementation="native")
        copies.append(dw.clone())
        p.x.fill_(float("nan"))
        p.gy.fill_(float("nan"))
        dw.fill_(float("nan"))
    assert all(torch.equal(copy, expected) for copy in copies)
