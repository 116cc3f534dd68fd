"""Operands spread over two GPUs, and failures: what is queued before an error, and what it leaves changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu import two_kit
from gpu.two_kit import Way, check, make, warm

import multigemm
from multigemm import errors

pytestmark = pytest.mark.two_gpus


def spread() -> dict[str, tuple[Callable[[], object], tuple[str, ...]]]:
    """Calls with one operand elsewhere, and the words that their errors have to have."""
    from multigemm.moe import Routing

    calls: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {}
    both = ("cuda:0", "cuda:1")
    rows = make(Way("grouped_mm"), "cuda:1")
    x, w, sizes = rows.late
    gy = rows.gy
    mm, wgrad = multigemm.grouped_mm, multigemm.grouped_mm_wgrad
    bias = torch.zeros(two_kit.GROUPS, two_kit.M, dtype=torch.float64, device="cuda:0")
    out = torch.empty_like(gy, device="cuda:0")
    calls["w"] = lambda: mm(x, w.to("cuda:0"), sizes), ("w must be on the device of x", *both)
    calls["x"] = lambda: mm(x.to("cuda:0"), w, sizes), ("w must be on the device of x", *both)
    calls["sizes"] = lambda: mm(x, w, sizes.to("cuda:0")), ("group_sizes must be on", *both)
    ends = sizes.cumsum(0).to("cuda:0")
    calls["offsets"] = lambda: mm(x, w, offsets=ends), ("offsets must be on", *both)
    calls["bias"] = lambda: mm(x, w, sizes, bias=bias), ("bias must be on the device of x", *both)
    plain = [t.detach() for t in (x, w)]
    calls["out"] = lambda: mm(*plain, sizes, out=out), ("out must be on the device of x", *both)
    calls["gy"] = lambda: wgrad(x, gy.to("cuda:0"), sizes), ("gy must be on the device of x", *both)
    calls["sizes of wgrad"] = lambda: wgrad(x, gy, sizes.to("cuda:0")), ("group_sizes must be on", *both)
    for what in ("native layer of experts", "layer of experts"):
        work = make(Way(what), "cuda:1")
        assert work.module is not None
        moved = work.late[0].detach().to("cuda:0")
        calls[what] = lambda work=work, moved=moved: work.function(moved), ("on the device of x", *both)
    tokens = work.late[0]
    routing = Routing(
        torch.zeros(tokens.shape[0], 2, dtype=torch.int64, device="cuda:0"),
        torch.ones(tokens.shape[0], 2, device="cuda:0"),
    )
    calls["routing"] = lambda: work.module(tokens, routing), ("routing.experts must be on", *both)
    for what in ("indexed linear", "fused contraction", "grouped contraction"):
        made = make(Way(what), "cuda:1")
        features, labels = made.late
        elsewhere = features.detach().to("cuda:0"), labels.to("cuda:0")
        order = multigemm.sort_by_group(elsewhere[1], 6)
        calls[f"{what}, x"] = (
            lambda made=made, given=elsewhere: made.function(*given),
            ("x must be on the device of the weights", *both),
        )
        calls[f"{what}, labels"] = (
            lambda made=made, given=elsewhere, x=features: made.function(x, given[1]),
            ("labels must be on the device of x", *both),
        )
        calls[f"{what}, order"] = (
            lambda made=made, order=order, x=features: made.module(x, order=order),
            ("order.permutation must be on the device of x", *both),
        )
    return calls


@pytest.mark.parametrize("current", [0, 1])
def test_operands_of_two_devices_are_refused(current: int) -> None:
    """Before anything is queued on either device, with the names of both."""
    with torch.cuda.device(current):
        for name, (call, words) in spread().items():
            with pytest.raises(errors.DeviceError) as caught:
                call()
            assert all(word in str(caught.value) for word in words), (name, str(caught.value))
            assert torch.cuda.current_device() == current


def test_nothing_is_queued_by_a_refused_call() -> None:
    x, w, sizes = make(Way("grouped_mm"), "cuda:1").late
    elsewhere = [t.detach().to("cuda:0") for t in (x, w, sizes)]
    layer = make(Way("native layer of experts"), "cuda:1")
    linear = make(Way("indexed linear"), "cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)

    def refused() -> None:
        for call in (
            lambda: multigemm.grouped_mm(x, elsewhere[1], sizes),
            lambda: multigemm.grouped_mm(x, w, elsewhere[2]),
            lambda: multigemm.grouped_mm_wgrad(x, elsewhere[0], sizes),
            lambda: layer.function(elsewhere[0].view(-1)[: 32 * 4].view(4, 32)),
            lambda: linear.function(elsewhere[0].view(-1)[: 64 * 4].view(4, 64), elsewhere[2][:4]),
        ):
            with pytest.raises(errors.DeviceError):
                call()

    assert two_kit.device_work(refused) == []
    seen = two_kit.device_work(lambda: multigemm.grouped_mm(x.detach(), w.detach(), sizes))
    assert seen and {device for _, device in seen} == {1}, "the trace sees what is not refused"


@pytest.mark.blas
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_after_a_failure_the_device_and_the_streams_are_the_callers() -> None:
    """Refused by the binding, and by the library inside its guard; the next call is right."""
    work = make(Way("grouped_mm", "blas"), "cuda:1")
    warm(work)
    x, w, sizes = (t.detach() for t in work.late)
    out = torch.empty(two_kit.ROWS, two_kit.M, dtype=torch.float64, device="cuda:1")
    leaf = torch.ops.multigemm.native_grouped_mm

    def unchanged() -> tuple[int, list[torch.cuda.Stream]]:
        return torch.cuda.current_device(), [torch.cuda.current_stream(index) for index in range(2)]

    side = torch.cuda.Stream(device=1)
    side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side), torch.cuda.device(0):
        before = unchanged()
        for given, name in ((out[:, 1:], "blas"), (out, "no such kernel")):
            with pytest.raises(RuntimeError, match="multigemm: "):
                leaf(x, w, sizes, False, None, given, "", name)
            assert unchanged() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=side), torch.cuda.device(0):
        before = unchanged()
        with pytest.raises(errors.NativeError, match="a graph is being captured") as caught:
            multigemm.grouped_mm(x, w, sizes, implementation="blas")
        assert unchanged() == before
    assert (caught.value.device, caught.value.status) == ("cuda:1", "MG_UNSUPPORTED")
    assert caught.value.stream not in (None, 0)
    with torch.cuda.stream(side), torch.cuda.device(0):
        y = work.call()
    side.synchronize()
    check(work.way, y)
