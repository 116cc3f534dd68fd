"""``multigemm bench`` on a GPU: the Triton peer is right, graphs can be turned off, the file is complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multigemm.cli.bench import cases, floor, peers, report, results, timing

CASES = [
    cases.Case("plain", "prefill_bf16", N=700, G=5, K=256, M=384),
    cases.Case("odd tiles", "prefill_bf16", N=333, G=7, K=136, M=72),
    cases.Case("one row each", "decode_bf16", N=9, G=9, K=512, M=256),
]


@pytest.mark.parametrize("op", floor.OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["random", "skew"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_triton_peer_is_right(case: cases.Case, kind: str, dtype: torch.dtype, op: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    p = peers.make(case, cases.draw_sizes(case, kind), dtype, torch.device("cuda"))
    call = peers.triton_grouped_mm(p, op)
    assert callable(call), call
    assert peers.check(p, op, call(), zero_tail=False) < 1e-2


def test_what_the_triton_peer_refuses() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    device = torch.device("cuda")
    odd = cases.Case("odd", "prefill_bf16", N=40, G=2, K=33, M=64)
    batch = cases.Case("batch", "equivariant_fp32_fp64", N=40, G=2, K=32, M=64, B=3)
    for case, dtype, text in (
        (odd, torch.bfloat16, "multiples of 8"),
        (batch, torch.bfloat16, "no batch dimension"),
        (CASES[0], torch.float32, "bfloat16 and float16 only"),
    ):
        p = peers.make(case, cases.draw_sizes(case, "random"), dtype, device)
        assert text in str(peers.triton_grouped_mm(p, "forward"))


@pytest.mark.parametrize("graph", ["--graph", "--no-graph"])
def test_a_run_from_end_to_end(graph: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    arguments = [
        "--device",
        "cuda",
        "--cases",
        "qwen3-decode1,small-md",
        "--sizes",
        "random",
        "--repeats",
        "5",
    ]
    arguments += ["--ops", "forward,wgrad,backward", "--budget", "1", "--json", str(file), graph]
    command = [sys.executable, "-m", "multigemm", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results.read(file)
    assert found.machine["gpu"] and found.machine["driver"]
    assert len(found.rows) == 3 * 3  # small-md in two dtypes
    replayed = json.loads(file.read_text())["notes"].get("graph replay", [])
    assert len(replayed) == (6 if graph == "--graph" else 0), replayed
    for row in found.rows:
        assert row.peers["loop"] and row.ours_ms > 0 and row.floor_ms > 0
        if "triton" in row.peers:
            assert (row.peers["triton"] is not None) == (row.dtype == "bfloat16")
    assert "small-md" in report.markdown(found)


@pytest.mark.parametrize("topic", ["symmetric_contraction", "indexed_linear"])
def test_equivariant_layers(topic: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    arguments = ["--device", "cuda", "--topic", topic, "--cases", "mace-off23-small", "--sizes", "100-few"]
    arguments += ["--repeats", "3", "--budget", "3", "--json", str(file)]
    command = [sys.executable, "-m", "multigemm", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results.read(file)
    assert len(found.rows) == 2 * 4  # dtypes and operations
    wall = found.notes["tables"]["wall time of eager calls, ms"]
    for row in found.rows:
        assert row.peers["loop"] and row.ours_ms > 0 and row.host_us and row.peak_bytes
        assert wall[f"{row.case} {row.sizes} {row.op} {row.dtype}"]["ours"] > 0


def test_random_numbers_are_drawn_after_a_capture_that_failed() -> None:
    """A peer that reads a value back cannot be captured: it is timed as it is, and the next row is drawn."""
    x = torch.ones(5, device="cuda")

    def reads() -> object:
        return torch.rand(3, device="cuda").sum().item() + x.sum().item()

    times = timing.side_by_side(x.device, {"reads": reads, "adds": lambda: x + 1}, 3, graph=True)
    assert not times["reads"].graphed and times["adds"].graphed
    assert torch.isfinite(torch.randn(5, device="cuda")).all()
    torch.manual_seed(3)
    one = torch.randn(5, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5, device="cuda"), one)
