"""Experts spread over processes: values, gradients and the order of exchanges, with gloo on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

import moe_parallel
import parallel_kit

from multigemm import errors
from multigemm.moe import ExpertParallelFeedForward, MoEConfig


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    return parallel_kit.run("moe_parallel", request.param)


@pytest.mark.parametrize("case", moe_parallel.CASES)
def test_case(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)


@pytest.mark.parametrize("case", moe_parallel.ALONE)
def test_case_of_a_group_of_one(case: str, tmp_path: Path) -> None:
    with parallel_kit.alone(tmp_path):
        moe_parallel.ALONE[case](torch.device("cpu"))


def test_the_example_trains() -> None:
    """As torchrun starts it."""
    example = Path(__file__).resolve().parents[2] / "docs" / "examples" / "expert_parallel.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(example),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:]), "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 3 and losses[2] < 0.6 * losses[0], done.stdout
    assert "experts 0 to 3" in done.stdout and "experts 4 to 7" in done.stdout


def test_without_a_process_group() -> None:
    config = MoEConfig(hidden_size=6, intermediate_size=5, num_experts=4, top_k=1)
    with pytest.raises(errors.OptionError, match="start the processes with torchrun"):
        ExpertParallelFeedForward(config)
