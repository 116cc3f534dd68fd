"""GPU calls on a wrong stream, with lost memory or devices, or failures untold; no GPU is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import oracle
import pytest
import torch
from contract.gpu_stand_in import kit

from multigemm import _abi

OPS = ("grouped_mm", "grouped_mm_wgrad")
NAMES = ("", "native", "simt", "blas", "torch")
SIZES = [6, 0, 9, 2, 3]


class Call:
    """One call of an operator; with bias, odd strides and a conversion, unless it is plain."""

    def __init__(
        self, op: str, name: str, *, plain: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        torch.manual_seed(0)
        self.op, self.dtype = op, dtype
        columns = slice(None) if plain else slice(0, None, 2)
        width = 8 if plain else 16
        self.x = torch.randn(23, 3, width).to(dtype)[..., columns]
        self.gy = torch.randn(23, 3, width).to(dtype)[..., columns]
        self.w = torch.randn(5, 3, 8, width).to(dtype)[..., columns]
        self.bias = None if plain else torch.randn(5, 3, 8).to(dtype)
        self.groups = torch.tensor(SIZES)
        out_dtype = dtype if plain else torch.float32
        if op == "grouped_mm":
            self.out = torch.full((23, 3, 8), float("nan"), dtype=out_dtype)
            self.problem: Any = _abi.grouped_mm_problem(
                self.x, self.w, self.groups, False, self.bias, self.out, "", name
            )
            self.operands = [t for t in (self.x, self.w, self.bias) if t is not None]
        else:
            self.out = torch.full((5, 3, 8, 8), float("nan"), dtype=out_dtype)
            self.problem = _abi.grouped_mm_wgrad_problem(
                self.x, self.gy, self.groups, False, False, self.out, "", name
            )
            self.operands = [self.x, self.gy]

    def run(self, library: kit.Library, where: str, memory: kit.Memory | None = None) -> kit.Done:
        return kit.call(
            library, self.problem, self.operands, self.groups, on_host=where == "host", memory=memory
        )

    def check(self) -> None:
        if self.op == "grouped_mm":
            expected = oracle.grouped_mm(self.x, self.w, SIZES, False, self.bias)
        else:
            expected = oracle.grouped_mm_wgrad(self.x, self.gy, SIZES)
        oracle.assert_close(self.out, expected, self.dtype, 9, 16.0)


def lent(library: kit.Library, name: str, **more: Any) -> kit.Memory:
    return kit.Memory(
        library, kit.STREAM, product=library.product_of(kit.STREAM) if name == "torch" else None, **more
    )


@pytest.fixture(params=[(op, name) for op in OPS for name in NAMES], ids="-".join)
def op_and_name(request: pytest.FixtureRequest, standin: kit.Library) -> tuple[str, str]:
    standin.let(kit.PACKED)
    return request.param


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("device", [0, 1, kit.DEVICE])
def test_the_caller_s_device_stays_current(
    standin: kit.Library, op_and_name: tuple[str, str], where: str, device: int
) -> None:
    op, name = op_and_name
    standin.control["set_device"](device)
    call = Call(op, name)
    done = call.run(standin, where, lent(standin, name))
    assert done.status == _abi.OK, done.error
    call.check()
    assert standin.current_device() == device
    changes = [record.detail for record in done.records if record.call == "set_device"]
    # Set even where it is current: that gives a thread, which may be a new one, the device's context.
    assert changes == ([kit.DEVICE] if device == kit.DEVICE else [kit.DEVICE, device])


@pytest.mark.parametrize("where", ["device", "host"])
def test_every_allocation_may_fail(standin: kit.Library, op_and_name: tuple[str, str], where: str) -> None:
    """The caller's allocator or the runtime's: a status, nothing lost, and the next call is right."""
    op, name = op_and_name
    for count in range(20):
        memory = lent(standin, name, refuse_after=count)
        done = Call(op, name).run(standin, where, memory)
        if done.status == _abi.OK:
            break
        assert done.status == _abi.OUT_OF_MEMORY
        assert done.error.startswith("MG_OUT_OF_MEMORY: no workspace of ")
    assert 0 < count < 20
    if name != "torch":
        for after in range(count):
            standin.fail("allocate", 2, after)
            done = Call(op, name).run(standin, where)
            assert done.status == _abi.OUT_OF_MEMORY
            assert "clear_error" in done.calls(), "the runtime's error is left to the caller"
    call = Call(op, name)
    assert call.run(standin, where, lent(standin, name)).status == _abi.OK
    call.check()


@pytest.mark.parametrize("where", ["device", "host"])
def test_every_call_of_the_runtime_may_fail(
    standin: kit.Library, op_and_name: tuple[str, str], where: str
) -> None:
    op, name = op_and_name
    for _ in range(2):  # the first call of a process reads the facts of its device and makes a handle
        usual = Call(op, name).run(standin, where, lent(standin, name))
        assert usual.status == _abi.OK, usual.error
    made = usual.calls()
    for call in sorted(set(made) - {"clear_error"}):
        for after in range(made.count(call)):
            if call in ("set_device", "handle_stream") and after == 1:
                continue  # at the end: there is nobody to tell
            standin.fail(call, 700, after)
            done = Call(op, name).run(standin, where, lent(standin, name))
            assert done.status == _abi.DEVICE_ERROR, (call, after, done)
            assert done.error.startswith("MG_DEVICE_ERROR: ")
            by_blas = call.startswith(("handle_", "blas_"))
            assert ("STAND_IN_700" if by_blas else "standInError700 (asked for by the test)") in done.error
            assert by_blas or "clear_error" in done.calls(), "the runtime's error is left to the caller"
    call = Call(op, name)
    assert call.run(standin, where, lent(standin, name)).status == _abi.OK
    call.check()


def test_a_failed_product_of_the_host(standin: kit.Library) -> None:
    for op in OPS:
        memory = lent(standin, "torch")
        memory.product = lambda product: 1
        done = Call(op, "torch").run(standin, "host", memory)
        assert (done.status, done.error) == (
            _abi.DEVICE_ERROR,
            "MG_DEVICE_ERROR: the host's matrix product failed",
        )
        done = Call(op, "torch").run(standin, "host")
        assert done.status == _abi.UNSUPPORTED and "lends no matrix product" in done.error


def test_a_device_without_machine_code_is_told(standin: kit.Library) -> None:
    standin.fail("launch", 209)
    done = Call("grouped_mm", "simt").run(standin, "device")
    assert done.status == _abi.NO_DEVICE_CODE
    assert "was not built for this device" in done.error and "multigemm doctor" in done.error


@pytest.mark.parametrize("error", [35, 222])
def test_a_driver_that_is_too_old_is_told(standin: kit.Library, error: int) -> None:
    standin.fail("set_device", error)
    done = Call("grouped_mm", "simt").run(standin, "device")
    assert done.status == _abi.DRIVER_TOO_OLD and "update the device's driver" in done.error


@pytest.mark.parametrize("op", OPS)
def test_a_device_that_is_not_there(standin: kit.Library, op: str) -> None:
    call = Call(op, "")
    call.problem.device = 9
    for answer in (standin.call(call.problem), standin.explain(call.problem)):
        assert answer in (_abi.INVALID_ARGUMENT, None)
        assert standin.last_error() == "MG_INVALID_ARGUMENT: device is 9, but there are 4 devices"
        assert standin.current_device() == 0
    call.problem.device = 3  # whose attributes nobody has read yet
    standin.fail("attribute", 700, 1 if op == "grouped_mm" else 2)
    if standin.call(call.problem) != _abi.OK:  # read once: by the first of the two operators
        assert standin.last_error().startswith(
            "MG_DEVICE_ERROR: reading a device's attributes failed: standIn"
        )
    standin.control["reset"]()
    assert standin.explain(call.problem) is not None


@pytest.mark.parametrize("where", ["device", "host"])
def test_captures(standin: kit.Library, op_and_name: tuple[str, str], where: str) -> None:
    """Sizes on the device can't be read while a graph is captured; everything else may be captured."""
    op, name = op_and_name
    standin.control["capture"](kit.STREAM)
    memory = lent(standin, name)
    call = Call(op, name)
    done = call.run(standin, where, memory)
    assert "copy_to_host" not in done.calls()
    if where == "device" and name in ("blas", "torch"):
        assert done.status == _abi.UNSUPPORTED
        assert done.error == (
            f'MG_UNSUPPORTED: implementation "{name}" can\'t take this call: it needs the group sizes on the '
            "host, and a graph is being captured; give them as a CPU tensor; leave the implementation out"
        )
        assert "launch" not in done.calls() and memory.allocated == 0
    else:
        assert done.status == _abi.OK, done.error
        call.check()
        asked = "is_capturing" in done.calls()
        assert not asked, "asking costs time and nothing depends on it"


@pytest.mark.parametrize("op", OPS)
def test_products_are_as_few_as_can_be(standin: kit.Library, op: str) -> None:
    """One call of a library for equal groups or where it takes many; no copies of what it reads as it is."""
    standin.let(kit.NOTHING)

    def run(sizes: list[int], grouped: bool, batch: int = 0) -> tuple[list[str], Any]:
        standin.control["grouped_products"](grouped)
        shape = (batch,) if batch else ()
        n, g = sum(sizes), len(sizes)
        x, gy, w = torch.randn(n, *shape, 8), torch.randn(n, *shape, 4), torch.randn(g, *shape, 8, 4)
        groups = torch.tensor(sizes)
        if op == "grouped_mm":
            problem: Any = _abi.grouped_mm_problem(x, w, groups, False, None, gy, "tf32", "blas")
        else:
            problem = _abi.grouped_mm_wgrad_problem(x, gy, groups, False, False, w, "tf32", "blas")
        done = kit.call(standin, problem, [x], groups, on_host=True)
        assert done.status == _abi.OK, done.error
        products = [r for r in done.records if r.call in ("blas_product", "blas_products")]
        assert all(r.detail == _abi.PRECISIONS["tf32"] for r in products)
        return [r.call for r in products], done.calls().count("launch")

    assert run([5, 5, 5, 5, 5], True) == (["blas_product"], 0)
    assert run([5, 5, 5, 5, 6], True) == (["blas_products"], 1)  # the kernel writes the addresses
    assert run([5, 5, 5, 5, 6], False) == (["blas_product"] * 5, 0)
    assert run([5, 5, 6], True) == (["blas_product"] * 3, 0)
    assert run([5, 6, 5, 5], True, batch=2) == (["blas_product"] * 4, 0)


@pytest.mark.parametrize("op", OPS)
def test_strides_past_32_bits_go_one_by_one(standin: kit.Library, op: str) -> None:
    """The product that takes many at once has strides of 32 bits; here rows of w or dw lie further apart."""
    standin.let(kit.NOTHING)
    standin.control["grouped_products"](True)
    far = 2**31 + 64
    w = torch.empty(far + 64, dtype=torch.float32).as_strided((5, 2, 4), (4, far, 1))
    x, gy, groups = torch.randn(11, 2), torch.randn(11, 4), torch.tensor([1, 1, 2, 3, 4])
    if op == "grouped_mm":
        w.copy_(torch.randn(5, 2, 4))
        problem: Any = _abi.grouped_mm_problem(x, w, groups, False, None, gy, "", "blas")
    else:
        problem = _abi.grouped_mm_wgrad_problem(x, gy, groups, False, False, w, "", "blas")
    done = kit.call(standin, problem, [x], groups, on_host=True)
    assert done.status == _abi.OK, done.error
    assert [c for c in done.calls() if c.startswith("blas_")] == ["blas_product"] * 5
    got, wanted = (gy, oracle.grouped_mm(x, w, groups.tolist())) if op == "grouped_mm" else (w, None)
    if wanted is None:
        wanted = oracle.grouped_mm_wgrad(x, gy, groups.tolist())
    oracle.assert_close(got, wanted, torch.float32, 11, 8.0)


@pytest.mark.parametrize("op", OPS)
def test_entries_of_b_become_rows_where_they_can(standin: kit.Library, op: str) -> None:
    standin.let(kit.ANYTHING)
    x, gy, w = torch.randn(20, 3, 8), torch.randn(20, 3, 8), torch.randn(2, 1, 8, 8)
    groups = torch.tensor([9, 7])
    lines = {}
    for folds in (True, False):
        given = x if folds else torch.randn(20, 4, 8)[:, :3]
        if op == "grouped_mm":
            y = torch.full_like(gy, float("nan"))
            problem: Any = _abi.grouped_mm_problem(given, w, groups, False, None, y, "", "blas")
            expected, out = oracle.grouped_mm(given, w, [9, 7]), y
        else:
            out = torch.full_like(w, float("nan"))
            problem = _abi.grouped_mm_wgrad_problem(given, gy, groups, False, True, out, "", "native")
            expected = oracle.grouped_mm_wgrad(given, gy, [9, 7], False, True)
        done = kit.call(standin, problem, [given, w if op == "grouped_mm" else gy], groups)
        assert done.status == _abi.OK, done.error
        oracle.assert_close(out, expected, torch.float32, 27, 16.0)
        lines[folds] = done.calls().count("launch")
    assert lines[True] != lines[False] or op == "grouped_mm"


def test_plan_needs_no_device(standin: kit.Library) -> None:
    class Device(ctypes.Structure):
        _fields_ = [(name, ctypes.c_int32) for name in ("major", "minor", "multiprocessors", "shared")] + [
            ("l2", ctypes.c_int64)
        ]

    standin.let(kit.PACKED)
    for op in OPS:
        call = Call(op, "")
        function = getattr(standin.handle, f"mg_{op}_plan_standin")
        text, length = ctypes.create_string_buffer(4096), ctypes.c_int64()
        device = Device(9, 0, 132, 232448, 50 << 20)
        arguments = [ctypes.byref(call.problem), ctypes.byref(device), text, ctypes.c_int64(4096)]
        standin.control["clear_log"]()
        assert function(*arguments, ctypes.byref(length)) == _abi.OK
        assert standin.calls() == [] and len(text.value) == length.value
        assert (b"x is copied first" in text.value) == (op == "grouped_mm")
