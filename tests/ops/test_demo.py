"""``multigemm demo``: it learns, both forms agree, and a layer that is wrong is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import multigemm
from multigemm.cli._app import app
from multigemm.cli.demo import command, compare, digits, molecules

pytest.importorskip("sklearn", reason="the demo needs multigemm[demo]")
pytest.importorskip("ase", reason="the demo needs multigemm[demo]")
pytest.importorskip("matplotlib", reason="the demo needs multigemm[demo]")

SHORT = digits.Config(epochs=6, experts=8)
FEW = molecules.Config(atoms=1, channels=4, out=4, repeats=1)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of sampling: here nobody looks at the times."""
    real = compare.cost
    for module in (digits, molecules):
        monkeypatch.setattr(module, "cost", lambda what, a, b, *rest: real(what, a, b, 1))


def test_digits_are_learned_and_the_loop_agrees() -> None:
    part, curve = digits.run(SHORT)
    assert part.faults == []
    assert curve.accuracy[-1] >= digits.REQUIRED_ACCURACY
    assert curve.loss[-1] < 0.2 * curve.loss[0]
    assert len(part.agreements) == 4
    assert all(a.holds for a in part.agreements)
    assert min(part.costs[0].grouped_bytes, part.costs[0].other_bytes) > 0
    assert ":" in part.facts["implementation"]


def test_the_split_is_fixed_and_no_image_is_in_both_parts() -> None:
    data, again = digits.load(), digits.load()
    assert (len(data.train_y), len(data.test_y)) == (1347, 450)
    assert torch.equal(data.test_x, again.test_x)
    assert not (torch.cdist(data.test_x, data.train_x) == 0).any()


def test_training_repeats_bit_by_bit() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = digits.Classifier(SHORT, digits.grouped_layer)
        losses.append(digits.train(model, digits.load(), digits.Config(epochs=1, experts=8)).loss)
    assert losses[0] == losses[1]


def swapped_experts(e: digits.Experts, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
    """Wrong: the second product takes each expert's neighbour."""
    order = multigemm.sort_by_group(chosen.flatten(), e.w1.shape[0])
    rows = h[order.permutation // chosen.shape[1]]
    inner = torch.nn.functional.gelu(multigemm.grouped_mm(rows, e.w1, order.group_sizes, bias=e.b1))
    outer = multigemm.grouped_mm(inner, e.w2.roll(1, 0), order.group_sizes, bias=e.b2)
    return (outer[order.inverse].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


def lost_gradient(e: digits.Experts, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
    """Wrong: right values, but the gradient of the first bias is twice what it should be."""
    y = digits.grouped_layer(e, h, chosen, weights)
    bias = e.b1.sum()
    return y + 1e-3 * (bias - bias.detach())


@pytest.mark.parametrize(
    ("layer", "found"), [(swapped_experts, "class scores"), (lost_gradient, "gradients")]
)
def test_a_wrong_layer_is_found_out(layer: digits.Layer, found: str) -> None:
    part, _ = digits.run(digits.Config(epochs=1, experts=8), layer)
    assert any(fault.startswith(found) for fault in part.faults)


def test_bad_accuracy_is_a_fault() -> None:
    part, _ = digits.run(digits.Config(epochs=1, experts=8, learning_rate=1e-6))
    assert any("test accuracy" in fault for fault in part.faults)


def test_molecules_agree_with_the_one_hot_einsum() -> None:
    part = molecules.run(FEW)
    assert part.faults == []
    assert [a.quantity for a in part.agreements] == list(molecules.NAMES)
    assert [c.what for c in part.costs] == ["product", "force training step"]
    assert part.costs[0].grouped_bytes < part.costs[0].other_bytes


def test_forces_and_second_derivatives_are_those_of_finite_differences() -> None:
    """Neither form is trusted: the energy alone is, and its differences in one direction."""
    batch = molecules.load(FEW)
    weights = molecules.make_weights(FEW, batch)
    exact = molecules.step(molecules.grouped_product, weights, batch)
    place, h = batch.positions.clone(), 1e-5
    move = weights.direction * batch.real.unsqueeze(-1)
    weights.direction.copy_(move)
    steps = []
    for sign in (1, -1):
        batch.positions.copy_(place + sign * h * move)
        steps.append(molecules.step(molecules.grouped_product, weights, batch))
    slope = (steps[0].energy - steps[1].energy) / (2 * h)
    assert float(slope) == pytest.approx(-float((exact.forces * move).sum()), rel=1e-6)
    batch.positions.copy_(place)
    bent = (steps[1].forces - steps[0].forces) / (2 * h)
    exact = molecules.step(molecules.grouped_product, weights, batch)
    assert compare.relative_difference(bent, exact.hessian_vector) < 1e-6


def test_an_energy_does_not_change_when_a_molecule_moves_as_a_whole() -> None:
    batch = molecules.load(FEW)
    weights = molecules.make_weights(FEW, batch)
    before = molecules.step(molecules.grouped_product, weights, batch, hessian=False)
    batch.positions += torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    after = molecules.step(molecules.grouped_product, weights, batch, hessian=False)
    assert compare.relative_difference(after.energy, before.energy) < 1e-12
    assert float(before.forces.sum(1).abs().max()) < 1e-10 * float(before.forces.abs().max()) + 1e-12


def swapped_elements(x: torch.Tensor, w: torch.Tensor, batch: molecules.Batch) -> torch.Tensor:
    return molecules.grouped_product(x, w.roll(1, 0), batch)


def frozen_weights(x: torch.Tensor, w: torch.Tensor, batch: molecules.Batch) -> torch.Tensor:
    return molecules.grouped_product(x, 0.5 * (w + w.detach()), batch)


@pytest.mark.parametrize(
    ("product", "found"), [(swapped_elements, molecules.NAMES[0]), (frozen_weights, molecules.NAMES[2])]
)
def test_a_wrong_product_is_found_out(product: molecules.Product, found: str) -> None:
    faults = molecules.run(FEW, product).faults
    assert any(fault.startswith(found) for fault in faults)


def test_the_command_draws_and_its_exit_code_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "Config", lambda seed: SHORT)
    monkeypatch.setattr(molecules, "Config", lambda seed: FEW)
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "test accuracy" in done.stdout
    assert (tmp_path / "new" / "multigemm-demo.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(digits, "REQUIRED_ACCURACY", 1.1)
    arguments = {"moe": True, "atoms": False, "out": tmp_path, "seed": 0, "threads": 1}
    assert command.run(**arguments) == 1  # type: ignore[arg-type]


def test_a_difference_of_shape_or_a_nan_is_infinite() -> None:
    one = torch.ones(3)
    assert compare.relative_difference(one, torch.ones(4)) == float("inf")
    assert compare.relative_difference(one * float("nan"), one) == float("inf")
    assert compare.relative_difference(one * 1.5, one) == pytest.approx(0.5)
