"""Two GPUs: a call on the wrong one, or a context where nobody works; and these tests without a defence."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.gpu_stand_in import kit
from contract.gpu_stand_in.two_devices import CASES, DEFENCES, NAMES, Product

from multigemm import _abi

ALL = [(defence, name) for defence in DEFENCES for name in CASES[defence]]


@pytest.fixture(scope="module")
def variants(standin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, kit.Library]:
    """The same library three times more, each without one defence."""
    folder = tmp_path_factory.mktemp("without")
    made = {}
    for defence in DEFENCES:
        (folder / defence).mkdir()
        made[defence] = kit.Library(kit.build(folder / defence, defence, standin_folder))
    return made


@pytest.mark.parametrize(("defence", "name"), ALL)
def test_contract(standin: kit.Library, defence: str, name: str) -> None:
    CASES[defence][name](standin)


@pytest.mark.parametrize(("defence", "name"), ALL)
def test_the_test_fails_without_its_defence(
    variants: dict[str, kit.Library], defence: str, name: str
) -> None:
    library = variants[defence]
    library.control["reset"]()
    with pytest.raises(AssertionError):
        CASES[defence][name](library)
    library.control["reset"]()


@pytest.mark.parametrize("defence", DEFENCES)
def test_what_is_left_out_is_told(
    standin: kit.Library, variants: dict[str, kit.Library], defence: str
) -> None:
    """And the rest is whole: on one device and its default stream nothing can be wrong."""
    assert standin.query()["without"] == []
    library = variants[defence]
    library.control["reset"]()
    assert library.query()["without"] == [defence]
    for name in NAMES:
        Product(name).run(library, 0, 0)


# --- contexts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("name", NAMES)
def test_no_context_is_made_on_a_device_that_nobody_uses(standin: kit.Library, name: str, where: str) -> None:
    """Device 0 is current as it is in every new process, and the operands are on device 1."""
    standin.let(kit.PACKED)
    standin.control["forget_contexts"]()
    Product(name).run(standin, 1, 0x7000, where)
    assert [standin.control["has_context"](d) for d in range(4)] == [0, 1, 0, 0]
    assert standin.current_device() == 0
    calls = standin.calls()
    assert calls.count("enter_context") == calls.count("leave_context") == 1 and "set_device" not in calls


def test_a_failure_leaves_the_context(standin: kit.Library) -> None:
    standin.control["forget_contexts"]()
    p = Product("simt")
    for call, error in (("enter_context", 700), ("launch", 719)):
        standin.fail(call, error)
        y = torch.empty(23, 7)
        problem: Any = _abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, y, "", "simt")
        problem.device, problem.stream, problem.groups.flags = 1, 0x7000, _abi.GROUPS_ON_HOST
        assert standin.call(problem) == _abi.DEVICE_ERROR
        assert str(error) in standin.last_error()
        assert standin.current_device() == 0 and not standin.control["has_context"](0)
        standin.control["drop"](0x7000)
    assert standin.control["complaints"]() == 0


# --- handles ------------------------------------------------------------------------------------------


class Nested(kit.Memory):
    """A caller whose allocator calls the library again, on another stream, while a handle is lent."""

    inner: Any = None

    def allocate(self, context: Any, size: int) -> int | None:
        inner, self.inner = self.inner, None
        if inner is not None and "handle_stream" in self.library.calls():
            assert self.library.call(inner) == _abi.OK, self.library.last_error()
        elif inner is not None:
            self.inner = inner
        return super().allocate(context, size)


def test_handles_are_counted_by_device_and_stream(standin: kit.Library) -> None:
    """Two at once on one device are two handles; later each stream takes the one that it had."""
    p, outputs = Product("blas"), [torch.empty(23, 7) for _ in range(2)]

    def problem(index: int, stream: int) -> Any:
        made = _abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, outputs[index], "", "blas")
        made.device, made.stream, made.groups.flags = 2, stream, _abi.GROUPS_ON_HOST
        return made

    memory = Nested(standin, 0xA000)
    memory.inner = problem(1, 0xB000)
    outer = problem(0, 0xA000)
    host = memory.host()
    outer.host = ctypes.pointer(host)
    standin.control["grouped_products"](True)
    standin.control["clear_log"]()
    assert standin.call(outer) == _abi.OK and memory.inner is None, "no product asked for memory"
    streams = [h["stream"] for h in standin.handles()["handles"] if h["device"] == 2]
    assert sorted(streams) == [0xA000, 0xB000]
    made = standin.handles()["made"]
    for _ in range(3):
        for stream in (0xA000, 0xB000):
            assert standin.call(problem(0, stream)) == _abi.OK
    assert standin.handles()["made"] == made
    streams = [h["stream"] for h in standin.handles()["handles"] if h["device"] == 2]
    assert sorted(streams) == [0xA000, 0xB000]
    # A third stream takes one that waits, rather than a handle more.
    assert standin.call(problem(0, 0xC000)) == _abi.OK
    assert standin.handles()["made"] == made
    for stream in (0xA000, 0xB000, 0xC000):
        standin.control["synchronize"](stream)


def test_handles_told_are_cut_at_the_callers_room(standin: kit.Library) -> None:
    Product("blas").run(standin, 0, 0)
    function = standin.handle.mg_blas_handles_standin
    length, text = ctypes.c_int64(), ctypes.create_string_buffer(9)
    assert function(text, ctypes.c_int64(9), ctypes.byref(length)) == _abi.OK
    assert text.value == b'{"made": '[:8] and length.value == len(json.dumps(standin.handles()))
    assert function(None, ctypes.c_int64(0), None) == _abi.INVALID_ARGUMENT


@pytest.mark.parametrize("call", ["handle_made", "handle_stream", "handle_workspace"])
def test_a_handle_that_cannot_be_had(standin: kit.Library, call: str) -> None:
    """The call fails with a status; nothing of it stays in the pool."""
    standin.control["set_device"](3)
    while any(h["device"] == 3 for h in standin.handles()["handles"]):  # of another test
        standin.fail("handle_workspace", 13)
        attempt(standin)
    standin.fail(call, 13)
    before = standin.handles()["handles"]
    assert attempt(standin) == _abi.DEVICE_ERROR and "STAND_IN_13" in standin.last_error()
    assert standin.handles()["handles"] == before
    assert attempt(standin) == _abi.OK
    assert [h["made_on"] for h in standin.handles()["handles"] if h["device"] == 3] == [3]


def attempt(library: kit.Library) -> int:
    p, y = Product("blas"), torch.empty(23, 7)
    problem: Any = _abi.grouped_mm_problem(p.x, p.w, p.groups, False, None, y, "", "blas")
    problem.device, problem.stream, problem.groups.flags = 3, 0xD000, _abi.GROUPS_ON_HOST
    status = library.call(problem)
    library.control["drop" if status else "synchronize"](0xD000)
    return status


def test_defences_are_read_by_few_files() -> None:
    """So that a build without one compiles seconds: CMake names the same files as read them."""
    text = (kit.ROOT / "shared" / "cmake" / "MultigemmBackend.cmake").read_text(encoding="utf-8")
    readers = [
        file.relative_to(kit.ROOT / "shared").as_posix()
        for file in sorted((kit.ROOT / "shared").rglob("*"))
        if file.suffix in (".h", ".cpp", ".cu", ".cuh") and "runtime/without.h" in file.read_text()
    ]
    assert f"foreach(source IN ITEMS {' '.join(readers)})" in text
