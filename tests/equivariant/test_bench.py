"""The benchmark's peers from other packages compute the same map, in every operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")
pytest.importorskip("cuequivariance_torch", reason="needs cuequivariance-torch")

from multigemm.cli.bench import contractions, linears, sides

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that are compared with

MODEL = sides.Model("small", 5, 4, ("0e", "1o"))


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float64, "all"), (torch.float32, "few")], ids=str)
@pytest.mark.parametrize("topic", [contractions, linears], ids=lambda t: t.__name__.rpartition(".")[2])
def test_peers_are_right(topic: Any, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contractions, "data", lambda: sides.Data((MODEL,), ("0e", "1o", "2e"), (30,), 3))
    p = topic.problem(MODEL, sides.Atoms(30, kind), dtype, torch.device("cpu"))
    made = {"ours": p.ours, **{name: make() for name, make in p.peers.items()}}
    assert set(made) == {"ours", *topic.PEERS}
    for op in sides.OPS:
        sides.prepare(p.reference, op)
        expected = sides.evaluate(p.reference, op)
        sums = {}
        for name, side in made.items():
            if name == "loop, kept" and op not in sides.FROZEN:
                continue
            sides.prepare(side, op)
            found = sides.evaluate(side, op)
            assert sides.errors(p, side, op, found, expected) <= sides.TOLERANCE[dtype], (op, name)
            sums[name], size = sides.inner(side, found)
            assert abs(sums[name] - sums["ours"]) <= sides.TOLERANCE[dtype] * size, (op, name)
