"""Tests that need a GPU: collected with ``--device cuda`` alone, so that no other run lists them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu.kit import lacks_blas

from multigemm import _dispatch
from multigemm._backend import Backend

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "two_gpus: the tensors are on another device than the current one")
    config.addinivalue_line("markers", "blas: takes the cuBLAS of the backend's major")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if torch.device(config.getoption("--device")).type != "cuda" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    count = torch.cuda.device_count() if ours else 0
    backend = _native() if ours else None
    for item in ours:
        given = getattr(getattr(item, "callspec", None), "params", {}).values()
        takes_blas = item.get_closest_marker("blas") or any(type(v) is str and v == "blas" for v in given)
        if backend is None:
            item.add_marker(pytest.mark.skip(reason="no native backend serves this GPU"))
        elif takes_blas and lacks_blas(backend):
            item.add_marker(pytest.mark.skip(reason=f"cuBLAS of CUDA {backend.info['major']} is not here"))
        elif item.get_closest_marker("two_gpus") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, {count} visible"))


def _native() -> Backend | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fallback, which is tested elsewhere
        try:
            return _dispatch.backend_for("cuda")
        except ImportError:
            return None


@pytest.fixture(autouse=True)
def _same_device_afterwards() -> Iterator[None]:
    """No call changes the current device or stream, whatever the test is about."""
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    yield
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before


@pytest.fixture
def poison(device: torch.device) -> Callable[[], None]:
    """Leaves NaN in what the caching allocator hands out next: in its large and its small blocks."""

    def fill() -> None:
        blocks = [torch.full((2**28,), float("nan"), device=device)]
        blocks += [
            torch.full((size,), float("nan"), device=device)
            for size in (2**17, 2**12, 2**8)
            for _ in range(32)
        ]
        torch.cuda.synchronize(device)
        del blocks

    return fill


@pytest.fixture
def room(device: torch.device) -> None:
    """Memory for operands of over 2^31 elements."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < 30 * 2**30:
        pytest.skip(f"needs 30 GiB of free GPU memory, {free >> 30} are there")
