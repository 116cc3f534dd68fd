"""IndexedLinear: values against a sum over paths, derivatives to the third, transforms, copies."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from calls import Calls

import multigemm
from multigemm.equivariant import IndexedLinear, Irreps

CASES = [
    ("4x0e + 3x1o", "2x0e + 5x1o"),
    ("2x1o + 3x0e + 1x1o + 2x2e", "4x1o + 2x0e + 3x1o + 2x3o"),
    ("3x0e", "2x1o"),
]
LABELS = [2, 0, 2, -1, 3, 0, 2, 5]  # of five elements, 1 and 4 absent; -1 and 5 are none


def expected(m: IndexedLinear, x: torch.Tensor, labels: list[int]) -> torch.Tensor:
    """Row by row, block by block, component by component."""
    rows = []
    for n, label in enumerate(labels):
        blocks = []
        for b, out in enumerate(m.irreps_out):
            y = torch.zeros(out.mul, out.ir.dim, dtype=torch.float64)
            sources = [a for a in m.irreps_in if a.ir == out.ir]
            at, column = 0, 0
            for block in m.irreps_in:
                values = x[n, column : column + block.dim].double()
                column += block.dim
                shape = (block.mul, block.ir.dim) if m.layout == "mul_ir" else (block.ir.dim, block.mul)
                values = values.view(shape) if m.layout == "mul_ir" else values.view(shape).T
                for o, other in enumerate(m.irreps_out):
                    if other.ir != block.ir:
                        continue
                    size = block.mul * other.mul
                    if o == b and 0 <= label < m.num_elements:
                        w = m.weight[label, at : at + size].detach().double().view(block.mul, other.mul)
                        y += w.T @ values / math.sqrt(sum(s.mul for s in sources))
                    at += size
            blocks.append((y if m.layout == "mul_ir" else y.T).reshape(-1))
        rows.append(torch.cat(blocks))
    return torch.stack(rows)


@pytest.fixture(params=["mul_ir", "ir_mul"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: tuple[str, str], layout: str, device: torch.device, poisoned: None) -> None:
    torch.manual_seed(0)
    m = IndexedLinear(*case, 5, layout=layout, device=device, dtype=torch.float64)
    x = torch.randn(8, m.irreps_in.dim, dtype=torch.float64)
    labels = torch.tensor(LABELS, device=device)
    y = m(x.to(device), labels).cpu()
    torch.testing.assert_close(y, expected(copy.deepcopy(m).cpu(), x, LABELS), rtol=1e-12, atol=1e-12)
    assert y[3].abs().max() == 0
    assert y[7].abs().max() == 0
    order = multigemm.sort_by_group(labels, 5)
    assert torch.equal(m(x.to(device), order=order).cpu(), y)


def test_one_hot_rows_are_labels(device: torch.device) -> None:
    m = IndexedLinear("2x0e + 2x1o", "3x0e + 1x1o", 4, device=device, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64, device=device)
    labels = torch.tensor([3, 0, 0, 2, 3], device=device)
    one_hot = torch.nn.functional.one_hot(labels, 4).double()
    assert torch.equal(m(x, one_hot), m(x, labels))
    one_hot[1] = 0
    assert m(x, one_hot)[1].abs().max() == 0


def test_a_mixture_is_refused_where_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    m = IndexedLinear("2x0e", "2x0e", 2)
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    with pytest.raises(multigemm.errors.OptionError, match="not one-hot"):
        m(torch.randn(1, 2), torch.tensor([[0.5, 0.5]]))


def test_derivatives_to_the_third_order(layout: str, device: torch.device) -> None:
    torch.manual_seed(1)
    m = IndexedLinear("2x0e + 1x1o", "1x1o + 2x0e", 3, layout=layout, device=device, dtype=torch.float64)
    labels = torch.tensor([2, 0, 2, -1], device=device)
    x = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    w = m.weight.detach().clone().requires_grad_()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return m(x, labels, weight=w).sin()

    def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(x, w).sum(), (x, w), create_graph=True)

    assert torch.autograd.gradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(first, (x, w))


def test_a_frozen_map_computes_no_gradient_of_its_weights(device: torch.device) -> None:
    m = IndexedLinear("2x0e", "2x0e", 3, device=device).requires_grad_(False)
    x = torch.randn(4, 2, device=device, requires_grad=True)
    with Calls() as calls:
        m(x, torch.tensor([2, 0, 1, 1], device=device)).sum().backward()
    assert calls.names["multigemm.grouped_mm.default"] == 2
    assert not any("wgrad" in name for name in calls.names)


def test_transforms(layout: str, device: torch.device) -> None:
    m = IndexedLinear("2x0e + 2x1o", "3x0e + 1x1o", 4, layout=layout, device=device, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64, device=device)
    labels = torch.tensor([3, 0, 0, 2, 3], device=device)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, labels), m(x, labels))
    exported = torch.export.export(m, (x, labels)).module()
    torch.testing.assert_close(exported(x, labels), m(x, labels))

    def energy(x: torch.Tensor) -> torch.Tensor:
        return m(x, labels).sin().sum()

    x.requires_grad_()
    gradient = torch.autograd.grad(energy(x), x, create_graph=True)[0].flatten()
    rows = [torch.autograd.grad(g, x, retain_graph=True)[0].flatten() for g in gradient]
    hessian = torch.stack(rows)
    torch.testing.assert_close(torch.func.hessian(energy)(x.detach()).reshape(40, 40), hessian)
    batched = torch.autograd.grad(
        gradient, x, torch.eye(40, dtype=torch.float64, device=device), is_grads_batched=True
    )[0]
    torch.testing.assert_close(batched.reshape(40, 40), hessian)


def test_copies_keep_the_map(device: torch.device) -> None:
    m = IndexedLinear("2x0e + 2x1o", "3x0e + 1x1o", 4, device=device)
    x, labels = torch.randn(3, 8, device=device), torch.tensor([1, 3, 0], device=device)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x, labels), m(x, labels))
    assert set(m.state_dict()) == {"weight"}
    assert m.double()(x.double(), labels).dtype == torch.float64


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_compute(rows: int, device: torch.device) -> None:
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    for case, elements in (
        (("2x0e", "1x1o"), 2),
        (("2x0e", ""), 2),
        (("", "2x0e"), 2),
        (("2x0e", "3x0e"), 0),
    ):
        m = IndexedLinear(*case, elements, device=device)
        y = m(torch.randn(rows, m.irreps_in.dim, device=device), labels)
        assert tuple(y.shape) == (rows, m.irreps_out.dim)
        assert y.numel() == 0 or y.abs().max() == 0


def test_bad_calls_say_what_is_wrong() -> None:
    with pytest.raises(multigemm.errors.OptionError, match=r'must read like .* got "?\'?8x0z'):
        IndexedLinear("8x0z", "1x0e", 1)
    with pytest.raises(multigemm.errors.OptionError, match="layout"):
        IndexedLinear("1x0e", "1x0e", 1, layout="mul")
    with pytest.raises(multigemm.errors.OptionError, match="path_normalization"):
        IndexedLinear("1x0e", "1x0e", 1, path_normalization="paths")
    m = IndexedLinear("2x0e", "1x0e", 3)
    x, labels = torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(multigemm.errors.ShapeError, match=r"\[N, 2\], got \[4, 3\]"):
        m(torch.randn(4, 3), labels)
    with pytest.raises(multigemm.errors.ShapeError, match=r"\[4\], got \[5\]"):
        m(x, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(multigemm.errors.ShapeError, match=r"one-hot \[4, 3\]"):
        m(x, torch.zeros(4, 2))
    with pytest.raises(multigemm.errors.OptionError, match="labels or order"):
        m(x)
    with pytest.raises(multigemm.errors.DTypeError, match="dtype of the weights"):
        m(x.double(), labels)
    with pytest.raises(multigemm.errors.ShapeError, match="order must be of 4 rows and 3 elements"):
        m(x, order=multigemm.sort_by_group(labels, 2))


def test_irreps() -> None:
    irreps = Irreps("2x0e+1o + 3 x 2e")
    assert str(irreps) == "2x0e+1x1o+3x2e"
    assert irreps.dim == 2 + 3 + 15
    assert irreps.starts() == [0, 2, 5]
    assert Irreps(irreps) is irreps
    assert copy.deepcopy(irreps) == irreps
    assert Irreps("").dim == 0


def test_an_order_of_another_device_is_refused(device: torch.device) -> None:
    """The indices would be read where they are not."""
    m = IndexedLinear("4x0e", "4x0e", 3, device=device)
    labels = torch.zeros(5, dtype=torch.int64)
    order = multigemm.sort_by_group(labels.to(device), 3)
    elsewhere = multigemm.sort_by_group(labels.to("meta"), 3)
    for name in ("permutation", "group_sizes"):
        mixed = order._replace(**{name: getattr(elsewhere, name)})
        with pytest.raises(multigemm.errors.DeviceError, match=rf"order.{name} must be on the device of x"):
            m(torch.ones(5, 4, device=device), order=mixed)
    with pytest.raises(multigemm.errors.DeviceError, match="got meta"):
        m(torch.ones(5, 4, device=device), order=elsewhere)
