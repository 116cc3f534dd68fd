"""``GroupedExperts`` as torchtitan has them: constructor, state dict, values and gradients."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("pydantic")

from multigemm.integrations import torchtitan as adapter

D, HIDDEN, E = 8, 16, 5
COUNTS = torch.tensor([3, 0, 4, 1, 0])


def filled(experts: Any) -> Any:
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def outcome(experts: Any, x: torch.Tensor, counts: torch.Tensor = COUNTS) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = experts(leaf, counts)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *experts.parameters()])]


def definition(experts: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    rows = []
    for e, part in enumerate(x[: int(counts.sum())].split(counts.tolist())):
        w1, w2, w3 = experts.w1[e], experts.w2[e], experts.w3[e]
        rows.append((F.silu(part @ w1.T) * (part @ w3.T)) @ w2.T)
    return torch.cat([*rows, x.new_zeros(x.shape[0] - int(counts.sum()), x.shape[1])])


@pytest.mark.parametrize("rows", [8, 11])
def test_values_and_gradients(rows: int) -> None:
    experts = filled(adapter.GroupedExperts(D, HIDDEN, E, use_grouped_mm=False)).double()
    x = torch.randn(rows, D, dtype=torch.float64)
    found = outcome(experts, x)
    leaf = x.clone().requires_grad_()
    y = definition(experts, leaf, COUNTS)
    expected = [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *experts.parameters()])]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(found[0], experts(x, COUNTS.double()))  # counts of torch.histc on a CPU


def test_no_rows_at_all() -> None:
    experts = filled(adapter.GroupedExperts(D, HIDDEN, E))
    found = outcome(experts, torch.randn(0, D), torch.zeros(E, dtype=torch.int64))
    assert found[0].shape == (0, D) and not any(g.any() for g in found[2:])


def test_initial_weights() -> None:
    experts = adapter.GroupedExperts(64, 32, 20)
    experts.init_weights(0.5)
    stds = {n: p.std().item() for n, p in experts.named_parameters()}
    assert stds == pytest.approx({"w1": 0.02, "w2": 0.5, "w3": 0.5}, rel=0.05)


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torchtitan imports
        for home in adapter.HOMES:
            try:
                return pytest.importorskip(home, reason="").GroupedExperts
            except pytest.skip.Exception:
                continue
    pytest.skip("needs torchtitan")


def plain(theirs: Any) -> bool:
    """Up to 0.2 it is constructed from numbers, from 0.3 on from a configuration."""
    return "config" not in inspect.signature(theirs.__init__).parameters


def make(theirs: Any, use_grouped_mm: bool) -> Any:
    if plain(theirs):
        return filled(theirs(D, HIDDEN, E, use_grouped_mm))
    return filled(theirs(theirs.Config(dim=D, hidden_dim=HIDDEN, num_experts=E)))


@pytest.mark.parametrize("use_grouped_mm", [False, True])
def test_equal_to_torchtitans(theirs: Any, use_grouped_mm: bool) -> None:
    if not plain(theirs):
        pytest.skip("torchtitan from 0.3 on constructs it from a configuration")
    own = make(theirs, use_grouped_mm)
    ours = adapter.GroupedExperts(D, HIDDEN, E, use_grouped_mm)
    ours.load_state_dict(own.state_dict())
    assert list(ours.state_dict()) == list(own.state_dict())
    assert list(inspect.signature(ours.__init__).parameters) == [
        "dim",
        "hidden_dim",
        "num_experts",
        "use_grouped_mm",
    ]
    assert set(inspect.signature(own.__init__).parameters) == set(inspect.signature(ours.__init__).parameters)
    x = torch.randn(8, D)
    if not use_grouped_mm:  # torchtitan's other path pads the rows with a kernel for GPUs
        expected = outcome(own, x)
        for a, b in zip(outcome(ours, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    else:
        rounded = filled(adapter.GroupedExperts(D, HIDDEN, E)).bfloat16()
        y = ours(x, COUNTS)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, definition(rounded.float(), x, COUNTS), rtol=0.1, atol=0.5)


def test_conversion_in_place(theirs: Any) -> None:
    own = make(theirs, False)
    holder = torch.nn.Sequential(torch.nn.Linear(2, 2), own)
    x = torch.randn(8, D)
    keys, expected = list(own.state_dict()), outcome(own, x)
    assert adapter.convert(holder) == 1 and adapter.convert(holder) == 0
    assert holder[1] is own and isinstance(own, theirs) and list(own.state_dict()) == keys
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if plain(theirs) else {"rtol": 0.1, "atol": 0.5}
    for a, b in zip(outcome(own, x), expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert adapter.convert(torch.nn.Linear(2, 2)) == 0
