"""Two GPUs in one process: work on the wrong device or stream, a caller whose device changes, handles shared.

Each operator and layer by each way, in float64, beside PyTorch's own operators on the CPU. A test that is
marked with a defence fails on a backend that was built without it: `ci/gpu_tests.py --without`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from gpu import two_kit
from gpu.two_kit import CAPTURED, SLOW, WAYS, Way, arriving, check, check_gradients, make, warm

import multigemm
from multigemm import errors

pytestmark = pytest.mark.two_gpus


@pytest.mark.parametrize(
    "where", [pytest.param(1, marks=pytest.mark.defence("guard")), 0], ids=["tensors on 1", "tensors on 0"]
)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_tensors_device_is_not_the_current_one(way: Way, where: int) -> None:
    """Their values come late on their own device: a launch anywhere else would read zeros, or be refused."""
    work = make(way, f"cuda:{where}")
    warm(work)
    with torch.cuda.device(1 - where):
        with arriving(work.late, lambda: None):
            y = work.call()
            assert torch.cuda.current_device() == 1 - where
        assert y.device == torch.device("cuda", where)
        check(way, y)
        found = work.gradients(work.gy)
        assert {g.device for g in found} == {y.device} and torch.cuda.current_device() == 1 - where
        check_gradients(way, found)


def needing_the_stream(ways: list[Way]) -> list[object]:
    """Marked but for the grouped contraction, which reads from its stream which elements there are: by then
    the slow work is done, and what is then on another stream may be right by chance."""
    mark = pytest.mark.defence("stream")
    return [
        pytest.param(way, marks=[] if way.what == "grouped contraction" else [mark], id=str(way))
        for way in ways
    ]


@pytest.mark.parametrize("way", needing_the_stream(WAYS))
def test_side_streams_of_both_devices(way: Way) -> None:
    """Each call waits for the slow producer on its device's current stream, and for no other."""
    works = [make(way, f"cuda:{index}", seed=index) for index in range(2)]
    warm(*works)
    sides = [torch.cuda.Stream(device=index) for index in range(2)]
    outputs: list[torch.Tensor] = []
    gradients: list[list[torch.Tensor]] = []
    with torch.cuda.stream(sides[0]), torch.cuda.stream(sides[1]), torch.cuda.device(0):
        assert [torch.cuda.current_stream(index) for index in range(2)] == sides
        with arriving(works[1].late, works[1].call), arriving(works[0].late, works[0].call):
            for work in works:  # device 0 is current for both
                outputs.append(work.call().detach().clone())
        for work in works:
            gradients.append(work.gradients(work.gy))
        assert [torch.cuda.current_stream(index) for index in range(2)] == sides
    for side in sides:
        side.synchronize()
    for seed, y in enumerate(outputs):
        check(way, y, seed)
        check_gradients(way, gradients[seed], seed)


def test_no_launch_is_on_another_device() -> None:
    """Read from CUDA's own trace: every kernel, copy and fill of every way, forward and backward."""
    for where in (1, 0):
        works = [make(way, f"cuda:{where}") for way in WAYS]
        with torch.cuda.device(1 - where):
            for work in works:
                work.call(), work.gradients(work.gy)
            torch.cuda.synchronize(where)

            def everything(works: list[two_kit.Work] = works) -> None:
                for work in works:
                    work.call(), work.gradients(work.gy)

            queued = two_kit.device_work(everything)
        assert len(queued) > 5 * len(WAYS), f"the trace is too short to tell: {queued}"
        assert [entry for entry in queued if entry[1] != where] == []


# --- operands of both ---------------------------------------------------------------------------------


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
    with torch.cuda.device(1), torch.cuda.graph(torch.cuda.CUDAGraph()), torch.cuda.device(0):
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


# --- threads ------------------------------------------------------------------------------------------


@pytest.mark.defence("guard")
def test_eight_threads_on_both_devices() -> None:
    """Each its own stream and current device, half of the calls for the device that is not current."""
    ways = two_kit.usable([way for way in WAYS if way.pin in (None, "blas", "simt")])
    works = {(way, index): make(way, f"cuda:{index}", seed=index) for way in ways for index in range(2)}
    warm(*works.values())
    right = {key: work.call().detach().clone() for key, work in works.items()}
    for (way, seed), y in right.items():
        check(way, y, seed)
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    barrier, failures = threading.Barrier(8), []

    def work_of(thread: int) -> None:
        try:
            mine = [torch.cuda.Stream(device=index) for index in range(2)]
            with torch.cuda.stream(mine[0]), torch.cuda.stream(mine[1]), torch.cuda.device(thread % 2):
                barrier.wait(60)
                for turn in range(6):
                    for step, way in enumerate(ways):
                        index = (thread + turn + step) % 2
                        with torch.no_grad():
                            y = works[way, index].call()
                        mine[index].synchronize()
                        if not torch.equal(y, right[way, index]):
                            failures.append((thread, turn, str(way), index))
                        if torch.cuda.current_device() != thread % 2:
                            failures.append((thread, turn, str(way), "current device"))
        except BaseException as error:
            failures.append((thread, repr(error)))

    threads = [threading.Thread(target=work_of, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.defence("stream")
@pytest.mark.parametrize("way", [way for way in WAYS if way.pin is None], ids=str)
def test_backward_on_autograds_threads(way: Way) -> None:
    """One pass through both devices: each has a thread, and each half waits for slow work on its stream."""
    works = [make(way, f"cuda:{index}", seed=index) for index in range(2)]
    warm(*works)
    sides = [torch.cuda.Stream(device=index) for index in range(2)]
    with torch.cuda.stream(sides[0]), torch.cuda.stream(sides[1]), torch.cuda.device(0):
        slow = [torch.zeros_like(work.gy) for work in works]
        y = [work.call() for work in works]
        leaves = [leaf for work in works for leaf in work.leaves]
        torch.autograd.grad(y, leaves, slow, retain_graph=True)  # so that memory of the streams is at hand
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        for index, work in enumerate(works):
            with torch.cuda.device(index):
                torch.cuda._sleep(SLOW)
                slow[index].copy_(work.gy)
        found = torch.autograd.grad(y, leaves, slow)
        assert torch.cuda.current_device() == 0
    for side in sides:
        side.synchronize()
    count = len(works[0].leaves)
    for seed in range(2):
        check_gradients(way, list(found[seed * count : (seed + 1) * count]), seed)


@pytest.mark.parametrize("way", [way for way in WAYS if way.pin is None], ids=str)
def test_a_pass_from_one_device_to_the_other(way: Way) -> None:
    """The gradient crosses back on the way; all of it from a thread that has used no device yet."""
    first, second = make(way, "cuda:0"), make(way, "cuda:1")
    expected = two_kit.expected(way)
    found: list[torch.Tensor] = []

    def run() -> None:
        y = first.call()
        z = second.call() * y.to("cuda:1")
        found.extend([z.detach(), *torch.autograd.grad(z, [*first.leaves, *second.leaves], second.gy)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found, "the thread failed"
    y = expected[0]
    torch.testing.assert_close(found[0].cpu(), y * y, rtol=1e-9, atol=1e-9)
    work = make(two_kit.plain(way), "cpu")
    gradients = work.gradients(work.gy * y)
    for ours, theirs in zip(found[1:], gradients * 2, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)


# --- graphs -------------------------------------------------------------------------------------------


@pytest.mark.defence("stream")
@pytest.mark.parametrize("way", CAPTURED, ids=str)
def test_capture_on_device_1(way: Way) -> None:
    """While device 0 is current inside the capture; replayed with other values, forward and backward."""
    work, other = make(way, "cuda:1"), make(way, "cuda:1", seed=1)
    warm(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        side = torch.cuda.Stream(device=1)
        side.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(side):
            for _ in range(2):
                work.gradients(work.gy)
        torch.cuda.current_stream(1).wait_stream(side)
        with torch.cuda.graph(graph), torch.cuda.device(0):
            y = work.call()
            found = torch.autograd.grad(y, work.leaves, work.gy)
            assert torch.cuda.current_device() == 0
    tensors = [*work.late, *work.leaves, work.gy]
    given = [*other.late, *other.leaves, other.gy]
    with torch.no_grad():
        for t, value in zip(tensors, given, strict=True):
            t.copy_(value)
    graph.replay()
    torch.cuda.synchronize(1)
    check(way, y, seed=1)
    check_gradients(way, list(found), seed=1)


# --- BLAS handles -------------------------------------------------------------------------------------


@pytest.mark.blas
@pytest.mark.defence("pool-key")
def test_each_handle_serves_the_device_that_it_was_made_on() -> None:
    """Counted in the library, since a foreign handle may do by chance."""
    way = Way("grouped_mm", "blas")
    for _ in range(2):
        for index in range(2):
            work = make(way, f"cuda:{index}")
            check(way, work.call())
    handles = two_kit.handles()
    assert {h["device"] for h in handles} == {0, 1}
    assert all(h["made_on"] == h["device"] and h["idle"] for h in handles), handles


@pytest.mark.blas
@pytest.mark.defence("pool-key")
def test_handles_are_counted_by_device_and_stream() -> None:
    """Calls one after the other need one handle a device, which is then told with the stream of its last."""
    way = Way("grouped_mm_wgrad", "blas")
    works = [make(way, f"cuda:{index}") for index in range(2)]
    for work in works:
        check(way, work.call())
    made = len(two_kit.handles())
    for _ in range(2):
        for index, work in enumerate(works):
            side = torch.cuda.Stream(device=index)
            with torch.cuda.stream(side), torch.cuda.device(1 - index):
                y = work.call()
                streams = [(h["device"], h["stream"]) for h in two_kit.handles()]
            side.synchronize()
            check(way, y)
            assert (index, side.cuda_stream) in streams, streams
    assert len(two_kit.handles()) == made, "calls one after the other made more handles"
    assert {h["made_on"] for h in two_kit.handles()} == {0, 1}


@pytest.mark.blas
def test_handles_of_many_threads_are_bounded() -> None:
    way = Way("grouped_mm", "blas")
    works = [make(way, f"cuda:{index}") for index in range(2)]
    failures: list[str] = []

    def run(thread: int) -> None:
        try:
            side = torch.cuda.Stream(device=thread % 2)
            with torch.cuda.stream(side), torch.no_grad():
                for _ in range(5):
                    works[thread % 2].call()
            side.synchronize()
        except BaseException as error:
            failures.append(repr(error))

    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    threads = [threading.Thread(target=run, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handles = two_kit.handles()
    assert failures == [] and 2 <= len(handles) <= 16
    assert all(h["idle"] and h["made_on"] == h["device"] for h in handles), handles
