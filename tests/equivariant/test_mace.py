"""MACE itself: couplings, contractions, and whole models whose layers are replaced, equal in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("ase", reason="needs ase")
pytest.importorskip("mace", reason="needs mace-torch")

import mace.tools
import numpy as np
from ase.build import bulk, molecule
from e3nn import o3
from mace import data, modules
from mace.modules.symmetric_contraction import SymmetricContraction as Theirs
from mace.tools import torch_geometric
from mace.tools.cg import U_matrix_real

from multigemm.equivariant import IndexedLinear, SymmetricContraction
from multigemm.equivariant._clebsch_gordan import coupling_basis, wigner_3j
from multigemm.errors import OptionError
from multigemm.integrations.mace import accelerate

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that are compared with

TABLE = mace.tools.AtomicNumberTable([1, 6, 7, 8, 14])
CUTOFF = 4.0
MOLECULES = ("CH3CH2OH", "H2O", "CH3CN", "C6H6", "SiH4", "N2")


@pytest.fixture(autouse=True)
def double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=["grouped", "fused"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_couplings_of_three_degrees() -> None:
    for a in range(6):
        for b in range(6):
            for c in range(abs(a - b), min(a + b, 8) + 1):
                torch.testing.assert_close(wigner_3j(a, b, c), o3.wigner_3j(a, b, c), rtol=0, atol=1e-12)


@pytest.mark.parametrize("irreps", ["0e+1o+2e+3o", "0e+1o+1e", "1o+0e"])
@pytest.mark.parametrize("out", ["0e", "1o", "2e", "1e", "0o"])
def test_symmetric_couplings(irreps: str, out: str) -> None:
    for nu in (1, 2, 3):
        u = U_matrix_real(o3.Irreps(irreps), o3.Irreps(out), nu, dtype=torch.float64, use_cueq_cg=False)[-1]
        mine = coupling_basis(irreps, out, nu)
        torch.testing.assert_close(mine, u.reshape(mine.shape), rtol=0, atol=1e-12)


def derivatives(f: Any, x: torch.Tensor, labels: torch.Tensor) -> list[list[torch.Tensor]]:
    """The value, and the gradients of sums of rising order, in x and every weight."""
    x = x.clone().requires_grad_()
    weights = [p for p in f.parameters() if p.requires_grad]
    levels = [[f(x, labels)]]
    total = levels[0][0].sin().sum()
    for _ in range(3):
        level = list(torch.autograd.grad(total, [x, *weights], create_graph=True))
        levels.append(level)
        total = sum(g.square().sum() for g in level)
    return levels


@pytest.mark.parametrize(
    ("irreps", "out", "correlation"),
    [
        ("4x0e+4x1o+4x2e+4x3o", "4x0e+4x1o", 3),
        ("3x0e+3x1o+3x2e", "3x0e+3x1o+3x2e", 2),
        ("2x0e+2x1o", "2x1o", 1),
        ("2x0e+2x1o+2x2e", "2x0o+2x1e", 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_contraction(irreps: str, out: str, correlation: int, dtype: torch.dtype, path: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    theirs = Theirs(o3.Irreps(irreps), o3.Irreps(out), correlation, num_elements=5)
    mine = SymmetricContraction.from_mace(theirs, path)
    width = sum(ir.dim for _, ir in o3.Irreps(irreps))
    x = torch.randn(9, mine.num_features, width)
    labels = torch.tensor([0, 2, 2, 0, 4, 0, 2, 4, 4])
    one_hot = torch.nn.functional.one_hot(labels, 5).to(dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for a, b in zip(derivatives(mine, x, labels), derivatives(theirs, x, one_hot), strict=True):
        size = max(t.abs().max().item() for t in b)
        for s, t in zip(a, b, strict=True):
            torch.testing.assert_close(s, t, rtol=tolerance, atol=tolerance * max(size, 1.0))


def test_states_go_both_ways() -> None:
    arguments: Any = (o3.Irreps("3x0e+3x1o"), o3.Irreps("3x0e+3x1o"), 3)
    theirs, other = (Theirs(*arguments, num_elements=4) for _ in range(2))
    mine = SymmetricContraction(*arguments, num_elements=4)
    mine.load_state_dict(theirs.state_dict())
    other.load_state_dict(mine.state_dict())
    x, labels = torch.randn(5, 3, 4), torch.tensor([0, 3, 1, 1, 0])
    one_hot = torch.nn.functional.one_hot(labels, 4).double()
    torch.testing.assert_close(other(x, one_hot), theirs(x, one_hot))
    torch.testing.assert_close(mine(x, labels), theirs(x, one_hot))
    with torch.no_grad():
        mine.contractions[0].weights_max.mul_(2)
    mine.copy_to_mace(theirs)
    torch.testing.assert_close(mine(x, labels), theirs(x, one_hot))


@pytest.mark.parametrize("normalization", ["element", "path", "none"])
def test_skip_products_go_both_ways(normalization: str) -> None:
    arguments: Any = ("4x0e+3x1o+2x0e", "3x0e", "2x0e+5x1o+3x0e")
    theirs = o3.FullyConnectedTensorProduct(*arguments, path_normalization=normalization)
    mine = IndexedLinear.from_e3nn(theirs)
    x, labels = torch.randn(7, 15), torch.tensor([0, 2, 2, 0, 2, 0, 2])
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    torch.testing.assert_close(mine(x, labels), theirs(x, one_hot))
    with torch.no_grad():
        mine.weight.mul_(2)
    mine.copy_to_e3nn(theirs)
    torch.testing.assert_close(mine(x, labels), theirs(x, one_hot))
    with pytest.raises(OptionError, match="one-hot"):
        IndexedLinear.from_e3nn(o3.FullyConnectedTensorProduct("2x0e", "1x1o", "2x1o"))


# --- whole models -----------------------------------------------------------------------------------


def model(**changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    block = modules.interaction_classes
    settings = {
        "r_max": CUTOFF, "num_bessel": 4, "num_polynomial_cutoff": 5, "max_ell": 3, "num_interactions": 2,
        "interaction_cls": block["RealAgnosticResidualInteractionBlock"],
        "interaction_cls_first": block["RealAgnosticInteractionBlock"],
        "num_elements": len(TABLE), "hidden_irreps": o3.Irreps("8x0e+8x1o"), "MLP_irreps": o3.Irreps("4x0e"),
        "gate": torch.nn.functional.silu, "atomic_energies": np.zeros(len(TABLE)), "avg_num_neighbors": 8,
        "atomic_numbers": TABLE.zs, "correlation": 3, "radial_type": "bessel", "atomic_inter_scale": 1.0,
        "atomic_inter_shift": 0.0,
    }  # fmt: skip
    return modules.ScaleShiftMACE(**{**settings, **changes})


def batch(atoms: list[Any]) -> dict[str, torch.Tensor]:
    made = [
        data.AtomicData.from_config(data.config_from_atoms(a), z_table=TABLE, cutoff=CUTOFF) for a in atoms
    ]
    return next(
        iter(torch_geometric.dataloader.DataLoader(made, batch_size=len(made), shuffle=False))
    ).to_dict()


def systems() -> dict[str, list[Any]]:
    crystal = bulk("Si", "diamond", a=5.4, cubic=True)
    crystal.rattle(0.1, seed=1)
    return {"molecules": [molecule(name) for name in MOLECULES], "crystal": [crystal]}


@pytest.mark.parametrize("which", ["molecules", "crystal"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"interaction_cls_first": modules.interaction_classes["RealAgnosticResidualInteractionBlock"]}],
    ids=["first block without skip", "residual"],
)
def test_energies_forces_and_stress(which: str, changes: dict[str, Any], path: str) -> None:
    theirs = model(**changes)
    mine = accelerate(copy.deepcopy(theirs), path)
    assert len(mine.replaced.contractions) == 2
    assert len(mine.replaced.skip_products) == 2
    b = batch(systems()[which])
    a, e = (m(dict(b), compute_stress=True) for m in (mine, theirs))
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(a[name], e[name], rtol=1e-10, atol=1e-12)
    assert e["forces"].abs().max() > 1e-4


def test_a_step_of_force_matching(path: str) -> None:
    theirs = model()
    mine = accelerate(copy.deepcopy(theirs), path)
    b = batch(systems()["molecules"])
    torch.manual_seed(1)
    target = torch.randn_like(b["positions"]) * 0.1
    losses: dict[str, list[float]] = {"mine": [], "theirs": []}
    for name, m in (("mine", mine), ("theirs", theirs)):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            out = m(dict(b), training=True)
            loss = (out["forces"] - target).square().sum() + out["energy"].square().sum()
            loss.backward()
            losses[name].append(loss.item())
            if name == "mine":
                assert m.products[0].symmetric_contractions.contractions[0].weights_max.grad.abs().max() > 0
                assert m.interactions[1].skip_tp.weight.grad.abs().max() > 0
            optimizer.step()
    assert losses["mine"][0] == pytest.approx(losses["theirs"][0], rel=1e-10)
    assert losses["mine"][2] < losses["mine"][0]
    # Skip weights are scaled otherwise than e3nn's, so later steps differ; contractions' gradients do not.
    first, second = accelerate(model(), path), model()
    for m in (first, second):
        out = m(dict(b), training=True)
        ((out["forces"] - target).square().sum() + out["energy"].square().sum()).backward()
    for p, q in zip(first.products, second.products, strict=True):
        for c, d in zip(
            p.symmetric_contractions.contractions, q.symmetric_contractions.contractions, strict=True
        ):
            torch.testing.assert_close(c.weights_max.grad, d.weights_max.grad, rtol=1e-8, atol=1e-10)


def test_models_are_saved_and_refused(tmp_path: Any) -> None:
    mine = accelerate(model())
    b = batch(systems()["crystal"])
    torch.save(mine, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(dict(b))["energy"], mine(dict(b))["energy"])
    with pytest.raises(OptionError, match="has no symmetric contraction"):
        accelerate(torch.nn.Linear(1, 1))
