"""Two processes with a GPU each: gradients of a part of the batch, and contexts on the other's device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pydantic")

import parallel_kit
from gpu import two_ranks_cases

# One process of the test run starts the two, whatever the number of workers.
pytestmark = [pytest.mark.two_gpus, pytest.mark.xdist_group("two ranks")]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    return parallel_kit.run("gpu.two_ranks_cases", 2, "nccl", timeout=170)


@pytest.mark.parametrize("case", two_ranks_cases.CASES)
def test_case(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)
