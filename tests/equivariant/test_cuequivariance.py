"""cuEquivariance itself: its linear maps of weight classes, and its basis of independent couplings."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuequivariance", reason="needs cuequivariance")
pytest.importorskip("cuequivariance_torch", reason="needs cuequivariance-torch")

import cuequivariance as cue
import cuequivariance_torch as cuet

from multigemm.equivariant import IndexedLinear, SymmetricContraction
from multigemm.errors import OptionError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that are compared with


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize(
    ("irreps_in", "irreps_out"),
    [("4x0e+3x1o", "2x0e+5x1o"), ("4x0e+3x1o+2x0e+2x1e", "2x0e+5x1o+3x0e")],
)
def test_linear_maps_go_both_ways(irreps_in: str, irreps_out: str, layout: str) -> None:
    torch.manual_seed(0)
    theirs = cuet.Linear(
        cue.Irreps("O3", irreps_in),
        cue.Irreps("O3", irreps_out),
        layout=getattr(cue, layout),
        weight_classes=3,
        internal_weights=True,
        method="naive",
        dtype=torch.float64,
    )
    mine = IndexedLinear.from_cuequivariance(theirs, layout)
    x = torch.randn(7, mine.irreps_in.dim, dtype=torch.float64)
    labels = torch.tensor([0, 2, 2, 0, 2, 0, 2])
    torch.testing.assert_close(mine(x, labels), theirs(x, weight_indices=labels))
    with torch.no_grad():
        mine.weight.mul_(2)
    mine.copy_to_cuequivariance(theirs)
    torch.testing.assert_close(mine(x, labels), theirs(x, weight_indices=labels))
    with pytest.raises(OptionError, match="other irreps or elements"):
        IndexedLinear(irreps_out, irreps_in, 3).copy_to_cuequivariance(theirs)


@pytest.mark.parametrize("correlation", [1, 2, 3])
def test_the_reduced_basis_gives_the_same_values(correlation: int) -> None:
    torch.manual_seed(0)
    full = SymmetricContraction(
        "3x0e+3x1o+3x2e", "3x0e+3x1o+3x2e", correlation, num_elements=4, dtype=torch.float64
    )
    reduced = full.with_basis(True)
    assert reduced.use_reduced_cg
    counts = [sum(w.shape[1] for ws in m._weights() for w in ws) for m in (reduced, full)]
    assert counts[0] <= counts[1]
    assert correlation == 1 or counts[0] < counts[1]
    x, labels = torch.randn(6, 3, 9, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 0, 3])
    torch.testing.assert_close(reduced(x, labels), full(x, labels))
    torch.testing.assert_close(reduced.with_basis(False)(x, labels), full(x, labels))
