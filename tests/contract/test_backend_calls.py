"""What a backend is told of a call, and what becomes of its failure.

The failure: group sizes in host memory read as device memory, a product on another stream than the current
one, and errors that lose the status on their way to the caller.
https://github.com/pytorch/pytorch/issues/81758 https://github.com/pytorch/pytorch/pull/192497
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import multigemm
from multigemm import _abi, _dispatch, errors
from multigemm.ops import _route

ON_HOST, OFFSETS = 2, 1


def problem(operands: str, groups: str, offsets: bool = False) -> _abi.GroupedMM:
    x, w, y = (torch.empty(shape, device=operands) for shape in ((4, 3), (2, 3, 5), (4, 5)))
    return _abi.grouped_mm_problem(x, w, torch.ones(2, dtype=torch.int64, device=groups), offsets, None, y)


@pytest.mark.parametrize("offsets", [False, True], ids=["sizes", "offsets"])
@pytest.mark.parametrize(
    ("operands", "groups", "on_host"), [("meta", "cpu", True), ("cpu", "cpu", False), ("meta", "meta", False)]
)
def test_where_the_groups_lie(operands: str, groups: str, on_host: bool, offsets: bool) -> None:
    """The flag says that they lie on the host while the operands do not. (meta stands in for a GPU.)"""
    flags = problem(operands, groups, offsets).groups.flags
    assert bool(flags & ON_HOST) == on_host and bool(flags & OFFSETS) == offsets


class Streaming(multigemm.accelerator.Accelerator):
    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=0x1234)


def test_the_stream_is_the_accelerators_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigemm.accelerator.get_accelerator", Streaming)
    assert problem("meta", "cpu").stream == 0x1234
    assert problem("cpu", "cpu").stream is None


def test_sizes_on_the_host_do_not_bring_the_hosts_autocast() -> None:
    """They give a call the CPU's autocast key; its dtype is not for operands of another device."""
    x, w = torch.empty(4, 3, device="meta"), torch.empty(2, 3, 5, device="meta")
    sizes = torch.tensor([1, 3])
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            torch.ops.multigemm.grouped_mm(x, w, sizes, False, None, None, "", "reference").dtype == x.dtype
        )
        here = multigemm.grouped_mm(torch.ones(4, 3), torch.ones(2, 3, 5), sizes)
    assert here.dtype == torch.bfloat16


TOLD = (
    'multigemm: grouped_mm failed with MG_UNSUPPORTED: implementation "blas" can\'t take this call '
    "(device cuda:1, stream 4660; x [4, 1, 3] float32, w [2, 1, 3, 5])\nException raised from somewhere"
)


@pytest.mark.parametrize(
    ("text", "device", "stream"),
    [
        (TOLD, "cuda:1", 4660),
        (TOLD.replace("cuda:1, stream 4660", "cpu, stream none"), "cpu", None),
    ],
    ids=["a GPU", "the CPU"],
)
def test_a_failure_keeps_its_status(
    text: str, device: str, stream: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaf(*arguments: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(_dispatch, "backend_for", lambda device_type: SimpleNamespace(name="fake"))
    x, w = torch.ones(4, 3), torch.ones(2, 3, 5)
    call = _route.implementation("grouped_mm", leaf, x.device, "native")
    with pytest.raises(errors.NativeError, match="grouped_mm: MG_UNSUPPORTED: implementation") as caught:
        call(x, w, "")
    assert (caught.value.status, caught.value.device, caught.value.stream) == (
        "MG_UNSUPPORTED",
        device,
        stream,
    )
    assert caught.value.shapes == {"x": (4, 3), "w": (2, 3, 5)}
    assert "Exception raised" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [("MG_NO_DEVICE_CODE", errors.NoKernelForArch), ("MG_DRIVER_TOO_OLD", errors.DriverTooOld)],
)
def test_a_machine_that_the_backend_does_not_serve(
    status: str, kind: type[errors.BackendError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an ImportError, as for a backend that could not be opened at all, and names a way out."""

    def leaf(*arguments: object) -> None:
        raise RuntimeError(TOLD.replace("MG_UNSUPPORTED", status))

    monkeypatch.setattr(_dispatch, "backend_for", lambda device_type: SimpleNamespace(name="fake"))
    call = _route.implementation("grouped_mm", leaf, torch.device("cpu"), "native")
    with pytest.raises(kind, match=r"grouped_mm on cuda:1: .*implementation='reference'") as caught:
        call(torch.ones(4, 3), torch.ones(2, 3, 5), "")
    assert isinstance(caught.value, ImportError) and caught.value.device_type == "cuda"
    assert caught.value.steps[0].startswith(status)


def test_another_failure_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaf(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(_dispatch, "backend_for", lambda device_type: SimpleNamespace(name="fake"))
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        _route.implementation("grouped_mm", leaf, torch.device("cpu"), "native")(torch.ones(1), "")


def test_a_refused_device_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork even an allocation on the device fails, with an error that names no way out."""

    def refuse(device_type: str) -> None:
        raise errors.BackendError("no backend here")

    def allocate(*arguments: object, **keywords: object) -> torch.Tensor:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(_dispatch, "backend_for", refuse)
    monkeypatch.setattr(torch.Tensor, "new_empty", allocate)
    x, w, sizes = torch.ones(4, 3), torch.ones(2, 3, 5), torch.tensor([1, 3])
    with pytest.raises(errors.BackendError, match="no backend here"):
        multigemm.grouped_mm(x, w, sizes)
    with pytest.raises(errors.BackendError, match="no backend here"):
        multigemm.grouped_mm_wgrad(x, x, sizes)
