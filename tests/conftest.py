"""Options, the implementations under test, and poisoned memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from gpu.kit import lacks_blas

import multigemm
from multigemm import _dispatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device that the operators' tests run on")
    parser.addoption(
        "--backend",
        default=None,
        help="native backend that must serve the device (cu12, cpu ...), or 'none'; default: what is there",
    )
    parser.addoption("--gpus", type=int, help="run what needs so many GPUs, and nothing else")
    parser.addoption("--without", help="run the tests of one defence of a backend, and nothing else")


def _implementations(config: pytest.Config) -> list[str]:
    """What can be pinned here; "" is the default choice, as a user gets it."""
    device = torch.device(config.getoption("--device"))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a GPU without a backend falls back with one warning, which is tested elsewhere
        backend = _dispatch.backend_for(device.type)
    wanted = config.getoption("--backend")
    if wanted is not None and (backend.name if backend else "none") != wanted:
        raise pytest.UsageError(f"--backend {wanted}: found {backend.name if backend else 'none'}")
    own = ("native", "simt") if lacks_blas(backend) else ("native", "blas", "simt")
    return ["reference", "torch", *(own if backend else ()), ""]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        names = _implementations(metafunc.config)
        metafunc.parametrize("implementation", names, ids=[name or "default" for name in names])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def pinned(implementation: str) -> Iterator[str]:
    """Run the test under one implementation."""
    with multigemm.use(implementation or None):
        yield implementation


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every block that torch hands out is full of NaN until somebody writes it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.ones(1).new_empty(4).isnan().all(), (
        "the poison does not work, so the test would prove nothing"
    )
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def backend(device: torch.device, poisoned: None) -> Iterator[None]:
    """A device with kernels, memory full of NaN, and on a GPU a stream of its own."""
    if _dispatch.backend_for(device.type) is None:
        pytest.skip(f"no backend serves {device.type!r}")
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
