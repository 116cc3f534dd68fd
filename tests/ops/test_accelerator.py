"""The accelerator interface: what a device is and prefers, without naming its kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import multigemm
from multigemm import errors
from multigemm.accelerator import Accelerator, _cuda, _registry


@pytest.fixture(autouse=True)
def clean_registry():
    before = dict(_registry._registered)
    yield
    _registry._registered.clear()
    _registry._registered.update(before)
    _registry._cache.clear()


def test_cpu() -> None:
    cpu = multigemm.get_accelerator("cpu")
    assert cpu.name == "cpu" and cpu.device_count() == 1
    assert cpu.current_device() == torch.device("cpu") and cpu.current_stream() is None
    assert isinstance(cpu.capability(), str)
    assert cpu.get_property("grouped_mm") is None and cpu.get_property("no such key") is None
    assert multigemm.get_accelerator(torch.ones(1)) is cpu is multigemm.get_accelerator(torch.device("cpu"))


def test_without_a_device_it_is_the_current_one() -> None:
    current = torch.accelerator.current_accelerator(check_available=True)
    assert multigemm.get_accelerator().device == (current or torch.device("cpu"))


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu", "privateuseone", "meta"])
def test_any_other_device_type_is_served(kind: str) -> None:
    """No notion of capability, no preference, no device here; nothing raises."""
    found = multigemm.get_accelerator(kind)
    assert type(found) is Accelerator and found.name == kind
    assert found.capability() is None and found.get_property("grouped_mm") is None
    if not torch.accelerator.is_available():
        assert found.device_count() == 0 and found.current_stream() is None
        assert found.current_device() == torch.device(kind)


class StubCuda(SimpleNamespace):
    """torch.cuda as it looks with two devices, the second of which is current."""

    def __init__(self, count: int) -> None:
        super().__init__(
            device_count=lambda: count,
            current_device=lambda: 1,
            current_stream=lambda device: f"stream of {device}",
            get_device_capability=lambda device: (9, 0) if device.index == 0 else (8, 0),
            get_device_properties=lambda device: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"),
        )


def test_cuda_and_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", StubCuda(2))
    cuda = _cuda.CUDAAccelerator(torch.device("cuda:0"))
    assert (cuda.name, cuda.device_count(), cuda.current_device()) == ("cuda", 2, torch.device("cuda:1"))
    assert cuda.capability() == (9, 0) and cuda.current_stream() == "stream of cuda:0"
    assert _cuda.CUDAAccelerator(torch.device("cuda:1")).capability() == (8, 0)
    rocm = _cuda.ROCmAccelerator(torch.device("cuda:0"))
    assert (rocm.name, rocm.capability()) == ("rocm", "gfx942")


def test_cuda_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", StubCuda(0))
    cuda = _cuda.CUDAAccelerator(torch.device("cuda"))
    assert cuda.device_count() == 0 and cuda.capability() is None and cuda.current_stream() is None
    assert cuda.current_device() == torch.device("cuda")


@pytest.mark.parametrize(("hip", "name"), [(None, "cuda"), ("7.14.60850", "rocm")])
def test_the_flavour_of_torch_decides(hip: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    _registry._cache.clear()
    assert multigemm.get_accelerator("cuda:0").name == name


def test_registration() -> None:
    class Mine(Accelerator):
        def get_property(self, key: str) -> str | None:
            return {"grouped_mm": "reference"}.get(key)

    multigemm.register_accelerator("xpu", Mine)
    assert isinstance(multigemm.get_accelerator("xpu:3"), Mine)
    assert multigemm.get_accelerator("xpu:3").get_property("grouped_mm") == "reference"
    with pytest.raises(errors.OptionError, match="'xpu' is registered already; pass replace=True"):
        multigemm.register_accelerator("xpu", Accelerator)
    multigemm.register_accelerator("xpu", Accelerator, replace=True)
    assert type(multigemm.get_accelerator("xpu:3")) is Accelerator
    with pytest.raises(errors.OptionError, match="factory must be callable"):
        multigemm.register_accelerator("npu", "not a factory")  # type: ignore[arg-type]
