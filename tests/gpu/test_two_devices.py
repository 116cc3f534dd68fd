"""Two GPUs in one process: work on the wrong device or stream, a caller whose device changes, handles shared.

Each operator and layer by each way, in float64, beside PyTorch's own operators on the CPU. A test that is
marked with a defence fails on a backend that was built without it: `ci/gpu_tests.py --without`.
"""

from __future__ import annotations

import threading

import pytest
import torch
from gpu import two_kit
from gpu.two_kit import CAPTURED, SLOW, WAYS, Way, arriving, check, check_gradients, make, warm

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


# --- threads ------------------------------------------------------------------------------------------


@pytest.mark.defence("guard")
def test_eight_threads_on_both_devices() -> None:
    """Each its own stream and current device, half of the calls for the device that is not current."""
    ways = two_kit.usable([way for way in WAYS if way.pin in (None, "blas", "simt")])
    works = {(way, index): make(way, f"cuda:{index}", seed=index) for way in ways for index in range(2)}
    warm(*works.values())
    with torch.no_grad():  # as below: where gradients are wanted, a layer may round elsewhere
        right = {key: work.call().clone() for key, work in works.items()}
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
        # The stream that PyTorch keeps for captures is of the device that was captured first.
        with torch.cuda.graph(graph, stream=side), torch.cuda.device(0):
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
