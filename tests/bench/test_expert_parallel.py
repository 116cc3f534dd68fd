"""``multigemm bench --topic expert_parallel``: what is drawn, measured and written; no absolute time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

pytest.importorskip("pydantic")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from multigemm.cli.bench import expert_parallel, report, results
from multigemm.cli.bench.command import Options
from multigemm.cli.bench.layers import Layer

LAYER = Layer("small", 16, 8, 12, 3)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", expert_parallel.KINDS)
def test_what_is_drawn(kind: str) -> None:
    """Distinct experts for each token; with "skew" some get far more than others."""
    x, experts = expert_parallel.draw(LAYER, 600, kind, torch.float32, CPU)
    again = expert_parallel.draw(LAYER, 600, kind, torch.float32, CPU)
    assert torch.equal(x, again[0]) and torch.equal(experts, again[1])
    assert x.shape == (600, 16) and experts.shape == (600, 3)
    assert all(len(set(row)) == 3 for row in experts.tolist())
    counts = torch.bincount(experts.reshape(-1), minlength=12)
    assert counts.sum() == 1800
    assert (int(counts.max()) > 4 * int(counts.min())) == (kind == "skew")


def test_options_are_refused() -> None:
    for options in (Options(device="cpu", sizes=["even"]), Options(device="cpu", names=["no such layer"])):
        with pytest.raises(typer.Exit) as caught:
            expert_parallel.run(options)
        assert caught.value.exit_code == 2


def test_one_gpu_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="takes two GPUs, 1 visible"):
        expert_parallel.processes(torch.device("cuda"))
    assert expert_parallel.processes(CPU) == 2


def test_two_processes(tmp_path: Path) -> None:
    """Values beside float64, times beside one process and the exchanges alone; read back as written."""
    path = tmp_path / "expert_parallel-cpu.json"
    options = Options(
        device="cpu", names=["qwen3-30b"], sizes=["skew"], quick=True, repeats=1, budget_s=0.1, json=path
    )
    assert expert_parallel.run(options) == 0
    found = results.read(path)
    assert [(row.sizes, row.op) for row in found.rows] == [
        ("2 x 64 skew", op) for op in ("forward", "forward+backward") for _ in expert_parallel.CHUNKS
    ]
    for row in found.rows:
        assert 0 < row.rel_err < 1e-5 and row.ours_ms > 0 and row.floor_ms > 0
        assert set(row.peers) == {"one process"} and row.peak_bytes
        assert row.kernel.endswith(("chunks=1", "chunks=4"))
    assert found.ceilings["exchange_tbps"] > 0 and found.ceilings["processes"] == 2
    (table,) = found.notes["tables"].values()
    assert len(table) == 2
    for times in table.values():
        assert set(times) == {"exchanges alone", "one process", "ours, chunks=1", "ours, chunks=4"}
    text = report.markdown(found)
    assert "exchanges alone" in text and "2 x 64 skew" in text and "float64" not in found.rows[0].dtype
    assert len(found.notes["method"]) == 5 and "64 MiB" in found.notes["method"][-1]
