"""Experts spread over GPUs of one machine, with NCCL: one process for each."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pydantic")

import parallel_kit
from gpu import moe_parallel_cases

# One process of the test run starts the others, whatever the number of workers.
pytestmark = [pytest.mark.two_gpus, pytest.mark.xdist_group("expert parallel")]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, {torch.cuda.device_count()} visible")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    return parallel_kit.run("gpu.moe_parallel_cases", request.param, "nccl", timeout=400)


@pytest.mark.parametrize("case", moe_parallel_cases.CASES)
def test_case(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)
