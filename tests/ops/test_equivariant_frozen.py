"""A frozen SymmetricContraction: one launch a call, which takes nothing that has changed for granted."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from ops.test_equivariant_contraction import CASES, columns, dense, features, make

import multigemm
from multigemm import _route_polynomial


def served(device: torch.device) -> None:
    if not _route_polynomial.served(device):
        pytest.skip(_route_polynomial.why_not(device))


@pytest.mark.parametrize("layout", ["whole", "mul_ir", "ir_mul"])
def test_a_frozen_call_is_one_launch(layout: str, device: torch.device) -> None:
    """Beside the kernel: what it writes to, and a view of x."""
    served(device)
    m = make(CASES[0], device, layout_in="ir_mul" if layout == "ir_mul" else "mul_ir").requires_grad_(False)
    x, labels = features(m, 4, device), torch.tensor([1, 2, 1, 7], device=device)
    x = x if layout == "whole" else x.flatten(1)
    expected = m(x, labels)
    for gradient in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = m(x.requires_grad_(gradient), labels)
        names = Counter({e.key: e.count for e in profile.key_averages() if "::" in e.key})
        assert torch.equal(y, expected)
        assert names.pop("multigemm::native_weighted_polynomial") == 1
        assert names.keys() <= {"aten::view", "aten::new_empty", "aten::empty", "aten::empty_strided"}


def test_a_frozen_call_sees_every_change(device: torch.device) -> None:
    m = make(CASES[0], device).requires_grad_(False)
    x, labels = features(m, 4, device), torch.tensor([1, 2, 1, 2], device=device)

    def fresh() -> torch.Tensor:
        return columns(m, dense(m, x, labels, m._weights()))

    def check() -> None:
        for _ in range(2):
            torch.testing.assert_close(m(x, labels), fresh())

    check()
    second = m.contractions[1]
    with torch.no_grad():
        second.weights[0].mul_(3)
    check()
    second.weights_max.data = second.weights_max.data * 2
    check()
    second.weights[1] = torch.nn.Parameter(second.weights[1] + 1, requires_grad=False)
    check()
    second.weights = torch.nn.ParameterList([w.detach() - 1 for w in second.weights]).requires_grad_(False)
    check()
    m.contractions[1] = copy.deepcopy(second)
    m.contractions[1].weights_max.data.zero_()
    check()
    m.contractions[0].weights_max.requires_grad_()
    assert m(x, labels).requires_grad
    m.requires_grad_(False)
    zeros = {name: torch.zeros_like(p) for name, p in m.named_parameters()}
    assert torch.func.functional_call(m, zeros, (x, labels)).abs().max() == 0
    check()
    single = copy.deepcopy(m).float()
    assert single(x.float(), labels).dtype == torch.float32
    torch.nn.utils.parametrizations.weight_norm(m.contractions[0], "weights_max")
    with torch.no_grad():
        m.contractions[0].parametrizations.weights_max.original0.mul_(2)
        check()


def test_a_wrong_call_is_refused_after_right_ones(device: torch.device) -> None:
    served(device)
    m = make(CASES[0], device).requires_grad_(False)
    x, labels = features(m, 4, device), torch.tensor([1, 2, 1, 2], device=device)
    m(x, labels)
    error = multigemm.errors
    for wrong, message in (
        ((x[:, :2], labels), "x must have shape"),
        ((x.flatten(), labels), "x must have shape"),
        ((x.float(), labels), "x must have the dtype of the weights"),
        ((x, labels[:3]), "labels must have shape"),
        ((x, labels.double()), "labels must be integers"),
        ((x, labels.bool()), "labels must be integers"),
        ((x, labels.tolist()), "labels must be a tensor"),
        ((x.to("meta"), labels), "x must be on the device of the weights"),
        ((x, labels.to("meta")), "labels must be on the device of x"),
    ):
        with pytest.raises((error.ShapeError, error.DTypeError, error.DeviceError), match=message):
            m(*wrong)
    with multigemm.use("reference"):
        torch.testing.assert_close(m(x, labels), m(x, labels.int()))
