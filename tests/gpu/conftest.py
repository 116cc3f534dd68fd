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
    config.addinivalue_line("markers", "two_gpus: takes two devices")
    config.addinivalue_line("markers", "xdist_group(name): of pytest-xdist, which may be absent")
    config.addinivalue_line("markers", "defence(name): fails on a backend that was built without it")
    config.addinivalue_line("markers", "blas: takes the cuBLAS of the backend's major")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if torch.device(config.getoption("--device")).type != "cuda" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    count = torch.cuda.device_count() if ours else 0
    backend = _native() if ours else None
    gpus, without = config.getoption("--gpus"), config.getoption("--without")
    if gpus is not None:
        if count < gpus or backend is None:
            served = "" if backend else ", and no native backend serves them"
            raise pytest.UsageError(f"--gpus {gpus}: {count} visible{served}")
        _select(config, items, [item for item in ours if item.get_closest_marker("two_gpus")])
    if without is not None:
        _select(config, items, [item for item in ours if without in _defences(item)])
    for item in ours:
        given = getattr(getattr(item, "callspec", None), "params", {}).values()
        takes_blas = item.get_closest_marker("blas") or any(getattr(v, "pin", v) == "blas" for v in given)
        if backend is None:
            item.add_marker(pytest.mark.skip(reason="no native backend serves this GPU"))
        elif takes_blas and lacks_blas(backend):
            item.add_marker(pytest.mark.skip(reason=f"cuBLAS of CUDA {backend.info['major']} is not here"))
        elif item.get_closest_marker("two_gpus") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, {count} visible"))


def _defences(item: pytest.Item) -> set[str]:
    return {mark.args[0] for mark in item.iter_markers("defence")}


def _select(config: pytest.Config, items: list[pytest.Item], wanted: list[pytest.Item]) -> None:
    kept = set(map(id, wanted))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _native() -> Backend | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fallback, which is tested elsewhere
        try:
            return _dispatch.backend_for("cuda")
        except ImportError:
            return None


@pytest.fixture(autouse=True)
def _same_device_afterwards() -> Iterator[None]:
    """No call changes the current device, or a device's current stream, whatever the test is about."""
    before = _current()
    yield
    assert _current() == before


def _current() -> tuple[int, list[torch.cuda.Stream]]:
    """Asks torch alone: no device is touched that no test has used."""
    return torch.cuda.current_device(), [
        torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())
    ]


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
