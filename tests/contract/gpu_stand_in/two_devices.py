"""Several devices on pretend ones: cases that need one defence each, for tests and for their tests.

A case is a function of the library; it fails where its defence is missing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import oracle
import torch

from multigemm import _abi

from . import kit, layers

Case = Callable[[kit.Library], None]
DEFENCES = ("guard", "stream", "pool-key")
CASES: dict[str, dict[str, Case]] = {name: {} for name in DEFENCES}
NAMES = ("", "native", "simt", "blas", "torch")
SIZES = [6, 0, 9, 2, 3]
STREAMS = (0x7000, 0x8000)
"""One of each of the two devices."""


def case(defence: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES[defence][function.__name__] = function
        return function

    return keep


class Product:
    """One call of both operators, of values of its own."""

    def __init__(self, name: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.name = name
        self.x, self.gy = torch.randn(23, 16)[:, ::2], torch.randn(23, 7)
        self.w, self.groups = torch.randn(5, 8, 7), torch.tensor(SIZES)

    def run(self, library: kit.Library, device: int, stream: int, where: str = "device") -> None:
        y, dw = torch.full((23, 7), float("nan")), torch.full((5, 8, 7), float("nan"))
        rows: Any = _abi.grouped_mm_problem(self.x, self.w, self.groups, False, None, y, "", self.name)
        wgrad: Any = _abi.grouped_mm_wgrad_problem(
            self.x, self.gy, self.groups, False, False, dw, "", self.name
        )
        for problem, other in ((rows, self.w), (wgrad, self.gy)):
            memory = None
            if self.name == "torch":
                memory = kit.Memory(library, stream, product=library.product_of(stream))
            done = kit.call(
                library, problem, [self.x, other], self.groups, on_host=where == "host", memory=memory,
                device=device, stream=stream,
            )  # fmt: skip
            assert done.status == _abi.OK, done.error
        oracle.assert_close(y, oracle.grouped_mm(self.x, self.w, SIZES), torch.float32, 8, 16.0)
        oracle.assert_close(dw, oracle.grouped_mm_wgrad(self.x, self.gy, SIZES), torch.float32, 9, 16.0)


# A case for each way, so that none hides behind another's failure.
for _name in NAMES:
    for _where in ("device", "host"):
        _title = f"{_name or 'default'}, sizes on the {_where}"

        def on_the_device_that_is_not_current(
            library: kit.Library, name: str = _name, where: str = _where
        ) -> None:
            """Either of two, while the other is current; every launch is on the operands' own."""
            library.let(kit.PACKED)
            for current, device in ((0, 1), (1, 0)):
                library.control["set_device"](current)
                Product(name).run(library, device, STREAMS[device], where)
                assert library.current_device() == current

        def in_the_order_of_the_calls_stream(
            library: kit.Library, name: str = _name, where: str = _where
        ) -> None:
            """The operands are there only once earlier work of that stream is done."""
            library.let(kit.PACKED)
            for device, stream in ((0, STREAMS[0]), (1, STREAMS[1]), (0, 0x7100)):
                library.control["set_device"](device)
                Product(name).run(library, device, stream, where)

        CASES["guard"][f"another device, {_title}"] = on_the_device_that_is_not_current
        CASES["stream"][f"a stream of its own, {_title}"] = in_the_order_of_the_calls_stream


# The same of what surrounds the products. Values are compared elsewhere: here it counts where work is queued.
for _function in layers.FUNCTIONS:

    def queued(library: kit.Library, device: int, function: str) -> list[kit.Record]:
        """What a call for a device queues there, while device 0 is current; its results are then written."""
        stream = STREAMS[device]
        problem, outputs = layers.calls(device, stream)[function]
        library.control["clear_log"]()
        call = getattr(library.handle, f"{function}_standin")
        assert call(ctypes.byref(problem)) == _abi.OK, library.last_error()
        assert library.current_device() == 0
        records = [record for record in library.records() if kit.ORDERED.match(record.call)]
        library.control["synchronize"](stream)
        written = not any(bool(output.isnan().any()) for output in outputs)
        library.control["drop"](None)
        assert records and any(record.call == "launch" for record in records)
        assert written, "the stream is done, and the results are not there"
        return records

    def on_its_device(library: kit.Library, function: str = _function) -> None:
        assert {record.device for record in queued(library, 1, function)} == {1}

    def on_its_stream(library: kit.Library, function: str = _function) -> None:
        for device in (0, 1):
            assert {record.stream for record in queued(library, device, function)} == {STREAMS[device]}

    CASES["guard"][f"another device, {_function}"] = on_its_device
    CASES["stream"][f"a stream of its own, {_function}"] = on_its_stream


@case("guard")
def eight_threads_on_two_devices(library: kit.Library) -> None:
    """Each call's work is on its own device and stream, whatever the others do."""
    library.let(kit.NOTHING)
    products = [Product(name, seed) for seed, name in enumerate(("", "simt", "blas", "native") * 2)]
    outputs = [torch.full((23, 7), float("nan")) for _ in products]
    barrier, statuses = threading.Barrier(8), []

    def work(index: int) -> None:
        p, stream = products[index], 0x9000 + index
        problem: Any = _abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, outputs[index], "", p.name)
        problem.device, problem.stream, problem.groups.flags = index % 2, stream, _abi.GROUPS_ON_HOST
        barrier.wait()
        for _ in range(20):
            statuses.append((library.call(problem), library.current_device()))
        library.control["synchronize"](stream)

    library.control["clear_log"]()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [(_abi.OK, 0)] * 160
    for record in library.records():
        if kit.ORDERED.match(record.call):
            assert record.stream >= 0x9000 and record.device == record.stream % 2, record
    for p, y in zip(products, outputs, strict=True):
        oracle.assert_close(y, oracle.grouped_mm(p.x, p.w, SIZES), torch.float32, 8, 16.0)


@case("pool-key")
def handles_belong_to_one_device(library: kit.Library) -> None:
    """One is made for each device, on it, and serves no other."""
    for turn in range(2):
        for device in (0, 1):
            library.control["set_device"](device)
            Product("blas").run(library, device, STREAMS[device])
            handles = library.handles()["handles"]
            assert all(h["device"] == h["made_on"] and h["idle"] for h in handles), handles
            assert {h["device"] for h in handles} >= ({0} if device == turn == 0 else {0, 1})


@case("pool-key")
def a_second_device_makes_a_second_handle(library: kit.Library) -> None:
    """Counted at the library: also where the first device's would do by chance."""
    before = {h["device"] for h in library.handles()["handles"]}
    device = next(d for d in (3, 2, 1) if d not in before)
    made = library.handles()["made"]
    library.control["set_device"](device)
    Product("blas").run(library, device, 0x7300)
    assert library.handles()["made"] == made + 1
    Product("blas").run(library, device, 0x7300)
    assert library.handles()["made"] == made + 1, "the next call takes the one that waits"
