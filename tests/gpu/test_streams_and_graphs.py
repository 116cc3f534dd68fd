"""The current stream is the one that works, in the backward pass too; calls can be captured and replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import oracle
import pytest
import torch
from gpu import kit

import multigemm
from multigemm import errors

SLOW = 200_000_000  # clock cycles, about a tenth of a second
CASE = kit.Case("stream", (130, 0, 257, 64), 128, 256, rest=9, bias=True)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_operands_that_are_late_on_a_side_stream(name: str | None, dtype: torch.dtype, where: str) -> None:
    """On any other stream the product would read the zeros, and its consumer the unwritten output."""
    p = kit.make(CASE, dtype)
    expected = p.forward(name, where), p.wgrad(name, where)
    late = [p.x, p.w, p.gy, p.bias, p.groups]
    ready = [t.clone() for t in late]
    for t in late:
        t.zero_()
    keyword = {"group_sizes": ready[-1].cpu()} if where == "host" else {"group_sizes": p.groups}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
        for t, value in zip(late, ready, strict=True):
            t.copy_(value)
        y = multigemm.grouped_mm(p.x, p.w, **keyword, bias=p.bias, implementation=name)
        dw = multigemm.grouped_mm_wgrad(p.x, p.gy, **keyword, implementation=name)
        copies = y.clone(), dw.clone()
    side.synchronize()
    for copy, result, right in zip(copies, (y, dw), expected, strict=True):
        assert torch.equal(copy, right) and torch.equal(result, right)


@pytest.mark.parametrize("name", [None, "native", "simt"])
def test_the_backward_pass_stays_on_its_stream(name: str | None) -> None:
    p = kit.make(CASE, torch.float64)

    def leaves() -> list[torch.Tensor]:
        return [t.detach().clone().requires_grad_() for t in (p.x, p.w, p.bias)]

    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm(x, w, p.groups, bias=bias, implementation=name).sin()

    plain = leaves()
    product(*plain).backward(p.gy)
    late = leaves()
    gy = torch.zeros_like(p.gy)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = product(*late)
        torch.cuda._sleep(SLOW)
        gy.copy_(p.gy)
        y.backward(gy)
    torch.cuda.synchronize()
    for ours, theirs in zip(late, plain, strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    # Called from another stream, the pass runs where the forward pass ran, and the caller's waits for it.
    late = leaves()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
        y = product(*late)
    y.backward(p.gy)
    copies = [t.grad.clone() for t in late]
    torch.cuda.synchronize()
    for copy, theirs in zip(copies, plain, strict=True):
        assert torch.equal(copy, theirs.grad)


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_the_first_call_of_a_thread(name: str | None, dtype: torch.dtype) -> None:
    """A new thread has no context of the driver's yet, autograd's thread at its first backward pass too."""
    p = kit.make(CASE, dtype)
    expected = outcome(
        p, name
    )  # leaves memory in the allocator's cache: the thread asks the runtime for none
    torch.cuda.synchronize()
    for call in (lambda: p.forward(name), lambda: p.wgrad(name)):
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda call=call, found=found: found.append(call()))
        thread.start()
        thread.join()
        assert len(found) == 1, "the thread failed"
        torch.cuda.synchronize()
        assert any(torch.equal(found[0], one) for one in expected)


def test_eight_threads_on_eight_streams() -> None:
    cases = [
        c for c in kit.SMALL if c.name in ("aligned", "odd widths", "batch", "equivariant, tiny matrices")
    ]
    cases += [
        c for c in kit.SMALL if c.name in ("narrow", "few rows", "batch, shared w", "thousands of groups")
    ]
    dtypes = [*kit.DTYPES, *reversed(kit.DTYPES)]
    problems = [kit.make(case, dtype) for case, dtype in zip(cases, dtypes, strict=True)]
    names = kit.usable((None, "native", "blas", "simt"))
    expected = [{name: outcome(p, name) for name in names} for p in problems]
    torch.cuda.synchronize()
    barrier, failures = threading.Barrier(8), []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for turn in range(25):
                for name in names:
                    found = outcome(problems[index], name)
                    torch.cuda.current_stream().synchronize()
                    same = all(torch.equal(a, b) for a, b in zip(found, expected[index][name], strict=True))
                    if not same:
                        failures.append((problems[index].case.name, name, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def outcome(p: kit.Operands, name: str | None) -> tuple[torch.Tensor, ...]:
    return p.forward(name), p.wgrad(name)


# --- graphs -----------------------------------------------------------------------------------------


def captured(
    call: Callable[[], tuple[torch.Tensor, ...]],
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def sizes_for(turn: int, count: int, rows: int) -> list[int]:
    """Other sizes at every replay: even, all in one group, none, too many, random."""
    generator = torch.Generator().manual_seed(turn)
    if turn == 0:
        return [rows // count] * count
    if turn == 1:
        return [0] * (count - 1) + [rows]
    if turn == 2:
        return [0] * count
    if turn == 3:
        return [rows, rows, *[1] * (count - 2)]
    return torch.randint(0, 2 * rows // count, (count,), generator=generator).tolist()


GRAPHS = [
    kit.Case("plain", (60, 60, 60, 60), 128, 192),
    kit.Case("odd", (60, 60, 60, 60), 67, 33, w="transposed", x="cut oddly", gy="cut oddly"),
    kit.Case("batch", (60, 60, 60, 60), 16, 48, b=5),
    kit.Case("shared", (60, 60, 60, 60), 16, 48, b=5, shared=True),
]


@pytest.mark.parametrize("offsets", [False, True], ids=["sizes", "offsets"])
@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", [None, "native", "simt"])
@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
def test_replay_with_other_sizes(case: kit.Case, name: str | None, dtype: torch.dtype, offsets: bool) -> None:
    p = kit.make(case, dtype)
    rows, count = p.x.shape[0], len(case.sizes)
    keyword = {"offsets" if offsets else "group_sizes": p.groups}

    def both() -> tuple[torch.Tensor, ...]:
        y = multigemm.grouped_mm(p.x, p.w, **keyword, implementation=name)
        dw = multigemm.grouped_mm_wgrad(p.x, p.gy, **keyword, sum_batch=case.shared, implementation=name)
        return y, dw

    graph, (y, dw) = captured(both)
    for turn in range(6):
        sizes = sizes_for(turn, count, rows)
        value = torch.tensor(sizes).cumsum(0) if offsets else torch.tensor(sizes)
        p.groups.copy_(value)
        for output in (y, dw):
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        oracle.assert_close(y, oracle.grouped_mm(p.x, p.w, sizes), dtype, case.k, 16.0)
        expected = oracle.grouped_mm_wgrad(p.x, p.gy, sizes, False, case.shared)
        oracle.assert_close(dw, expected, dtype, rows * (case.b or 1 if case.shared else 1), 16.0)


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_sizes_on_the_host_are_captured_as_they_are(name: str | None, dtype: torch.dtype) -> None:
    """Every implementation can be captured then; replays see new operands and the sizes of the capture."""
    p = kit.make(kit.Case("host", (60, 0, 33, 60), 64, 96, rest=5), dtype)
    sizes = p.groups.cpu()

    def both() -> tuple[torch.Tensor, ...]:
        y = multigemm.grouped_mm(p.x, p.w, sizes, implementation=name)
        return y, multigemm.grouped_mm_wgrad(p.x, p.gy, sizes, implementation=name)

    graph, (y, dw) = captured(both)
    sizes.zero_()
    for seed in (2, 3):
        torch.manual_seed(seed)
        for t in (p.x, p.w, p.gy):
            t.copy_(torch.randn(t.shape, device=t.device))
        for output in (y, dw):
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        given = list(p.case.sizes)
        oracle.assert_close(y, oracle.grouped_mm(p.x, p.w, given), dtype, 64, 16.0)
        oracle.assert_close(dw, oracle.grouped_mm_wgrad(p.x, p.gy, given), dtype, 60, 16.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_is_captured(dtype: torch.dtype) -> None:
    """Forward and backward pass in one graph, as `torch.cuda.make_graphed_callables` would record them."""
    p = kit.make(GRAPHS[0], dtype)
    x, w = p.x.requires_grad_(), p.w.requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        y = multigemm.grouped_mm(x, w, p.groups)
        return (y, *torch.autograd.grad(y, (x, w), p.gy))

    graph, (y, gx, gw) = captured(step)
    for turn in range(5):
        sizes = sizes_for(turn, 4, x.shape[0])
        with torch.no_grad():
            p.groups.copy_(torch.tensor(sizes))
        graph.replay()
        torch.cuda.synchronize()
        oracle.assert_close(y, oracle.grouped_mm(x, w, sizes), dtype, 128, 16.0)
        oracle.assert_close(gx, oracle.grouped_mm(p.gy, w.mT, sizes), dtype, 192, 16.0)
        oracle.assert_close(gw, oracle.grouped_mm_wgrad(x, p.gy, sizes), dtype, x.shape[0], 16.0)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", ["blas", "torch"])
def test_what_needs_sizes_on_the_host_says_so_in_a_capture(name: str) -> None:
    p = kit.make(GRAPHS[0], torch.float32)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(errors.NativeError, match="give them as a CPU tensor"), torch.cuda.graph(graph):
        p.forward(name)
    torch.cuda.synchronize()
    p.check_forward(p.forward(name))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """Sizes on the device are not read back: the host is done long before a busy device has begun."""
    p = kit.make(CASE, dtype)
    p.forward(), p.wgrad()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(5 * SLOW)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, dw = p.forward(), p.wgrad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done.record()
    assert not done.query(), "the calls waited for the device"
    p.check_forward(y)
    p.check_wgrad(dw)
