"""Experts spread over processes: values, gradients and the order of exchanges, with gloo on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

import moe_parallel
import parallel_kit
from moe_kit import SMALL, VARIANTS, make, tokens

from multigemm import errors
from multigemm.moe import ExpertParallelFeedForward, MoEConfig, expert_parallel


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    return parallel_kit.run("moe_parallel", request.param)


@pytest.mark.parametrize("case", moe_parallel.CASES)
def test_case(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[torch.device]:
    """A group of one, in this process, for what imports the compiler: that takes seconds in each."""
    with parallel_kit.alone(tmp_path):
        yield torch.device("cpu")


def test_recomputation(alone: torch.device) -> None:
    moe_parallel.compare({**SMALL, **VARIANTS["recompute"]}, alone, chunks=2)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, about gradients of what it passes on
def test_inside_a_compiled_model(alone: torch.device) -> None:
    layer = expert_parallel(make(SMALL, None, alone))
    model = torch.nn.Sequential(torch.nn.Linear(6, 6).double(), layer, torch.nn.ReLU())
    x = tokens(5, alone)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


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
