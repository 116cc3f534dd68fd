"""IndexedLinear by kernels, without the dispatcher: the same values and derivatives as by operators, and
nothing kept of a call before."""

from __future__ import annotations

import pytest
import torch
from calls import Calls

import multigemm
from multigemm.equivariant import IndexedLinear

CASES = [
    ("4x0e + 3x1o", "4x0e + 3x1o"),
    ("2x1o + 3x0e + 1x1o + 2x2e", "4x1o + 2x0e + 3x1o + 2x3o"),
    ("3x0e + 0x1o", "2x1o + 1x0e + 0x0e"),
]
LABELS = [2, 0, 2, -1, 3, 0, 2, 5, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max]


@pytest.fixture(params=["mul_ir", "ir_mul"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(case: tuple[str, str], device: torch.device, **options: object) -> IndexedLinear:
    torch.manual_seed(0)
    options = {"dtype": torch.float64, **options}
    return IndexedLinear(*case, 5, device=device, **options)  # type: ignore[arg-type]


def derivatives(
    m: IndexedLinear, x: torch.Tensor, gy: torch.Tensor, **how: torch.Tensor
) -> list[torch.Tensor]:
    """y; its gradients without and with a graph of their own; the gradients of those."""
    x = x.detach().requires_grad_()
    y = m(x, **how)
    gy = gy.detach().requires_grad_()
    found = [y, *torch.autograd.grad(y, (x, m.weight), gy, retain_graph=True)]
    found.append(torch.autograd.grad(y, x, gy, retain_graph=True)[0])
    found.append(torch.autograd.grad(y, m.weight, gy, retain_graph=True)[0])
    gx, gw = torch.autograd.grad(y, (x, m.weight), gy, create_graph=True)
    found += [gx, gw]
    if gx.requires_grad:
        found += torch.autograd.grad(gx.sin().sum() + gw.cos().sum(), (x, m.weight, gy), retain_graph=True)
        ggx = torch.autograd.grad(gw.sin().sum(), x, create_graph=True)[0]
        found += torch.autograd.grad(ggx.cos().sum(), (x, gy), allow_unused=True)
    return [f.detach() for f in found if f is not None]


@pytest.mark.parametrize("normalization", ["element", "path", "none"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_and_operators_agree(
    case: tuple[str, str], normalization: str, layout: str, device: torch.device, poisoned: None
) -> None:
    m = made(case, device, layout=layout, path_normalization=normalization)
    labels = torch.tensor(LABELS, device=device)
    x = torch.randn(10, m.irreps_in.dim, dtype=torch.float64, device=device)
    gy = torch.randn(10, m.irreps_out.dim, dtype=torch.float64, device=device)
    order = multigemm.sort_by_group(labels, 5)
    with Calls():  # a mode: everything goes through the dispatcher
        expected = derivatives(m, x, gy, labels=labels)
    for how in ({"labels": labels}, {"labels": labels.clamp(-9, 9).int()}, {"order": order}):
        found = derivatives(m, x, gy, **how)  # type: ignore[arg-type]
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        y, gx, gw, *_ = found
        for n in (3, 7, 8, 9):
            assert y[n].abs().sum() == 0
            assert gx[n].abs().sum() == 0
        assert gw[[1, 4]].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_strides_and_dtypes(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    m = made(CASES[1], device, layout=layout, dtype=dtype)
    labels = torch.tensor(LABELS, device=device)
    wide = torch.randn(30, 10, device=device).to(dtype)
    x = wide[3 : 3 + m.irreps_in.dim].T  # neither contiguous nor at the start of its memory
    w = torch.randn(m.weight_numel + 1, 5, device=device).to(dtype)[1:].T
    y = m(x, labels, weight=w)
    assert y.dtype == dtype
    assert y.is_contiguous()
    torch.testing.assert_close(y, m(x.contiguous(), labels, weight=w.contiguous()))
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(m(leaf, labels, weight=w).sum(), leaf)  # an expanded gradient
    ones = torch.ones_like(y)
    (expected,) = torch.autograd.grad(m(leaf, labels, weight=w.contiguous()), leaf, ones)
    torch.testing.assert_close(g, expected)


def test_nothing_is_kept_of_the_weights(device: torch.device) -> None:
    m = made(CASES[0], device).requires_grad_(False)
    x = torch.randn(10, m.irreps_in.dim, dtype=torch.float64, device=device)
    labels = torch.tensor(LABELS, device=device)
    y = m(x, labels)
    assert not y.requires_grad
    m.weight.mul_(2)
    torch.testing.assert_close(m(x, labels), 2 * y)
    m.weight.data.mul_(2)
    torch.testing.assert_close(m(x, labels), 4 * y)
    m.weight = torch.nn.Parameter(m.weight.detach() / 4)
    torch.testing.assert_close(m(x, labels), y)
    assert m(x, labels).requires_grad
    m.requires_grad_(False)
    assert not m(x, labels).requires_grad
    assert m(x.clone().requires_grad_(), labels).requires_grad
    torch.testing.assert_close(m.float()(x.float(), labels), y.float(), rtol=1e-4, atol=1e-4)
    with pytest.raises(multigemm.errors.DTypeError, match="dtype of the weights"):
        m(x, labels)
    m.to("meta")
    with pytest.raises(multigemm.errors.DeviceError, match="device of the weights, meta"):
        m(x.float(), labels)
    assert m(x.float().to("meta"), labels.to("meta")).shape == y.shape


def test_no_rows(layout: str, device: torch.device) -> None:
    m = made(CASES[0], device, layout=layout)
    x = torch.zeros(0, m.irreps_in.dim, dtype=torch.float64, device=device, requires_grad=True)
    y = m(x, torch.zeros(0, dtype=torch.int64, device=device))
    gx, gw = torch.autograd.grad(y.sum(), (x, m.weight))
    assert gx.shape == x.shape
    assert gw.shape == m.weight.shape
    assert gw.abs().sum() == 0


def test_autocast(device: torch.device) -> None:
    m = made(CASES[0], device, dtype=torch.float32)
    x = torch.randn(10, m.irreps_in.dim, device=device, requires_grad=True)
    labels = torch.tensor(LABELS, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = m(x, labels)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), m(x, labels), rtol=0.1, atol=0.1)
    gx, gw = torch.autograd.grad(y.float().sum(), (x, m.weight))
    assert gx.dtype == gw.dtype == torch.float32


def test_batched_gradients_and_tangents_of_a_recorded_call(layout: str, device: torch.device) -> None:
    """The node was recorded where nothing stood in between; its gradients are taken where something does."""
    m = made(CASES[0], device, layout=layout)
    x = torch.randn(10, m.irreps_in.dim, dtype=torch.float64, device=device, requires_grad=True)
    labels = torch.tensor(LABELS, device=device)
    y = m(x, labels)
    gys = torch.randn(3, *y.shape, dtype=torch.float64, device=device)
    batched = torch.autograd.grad(y, (x, m.weight), gys, is_grads_batched=True, retain_graph=True)
    for i, gy in enumerate(gys):
        one = torch.autograd.grad(y, (x, m.weight), gy, retain_graph=True)
        for a, b in zip(batched, one, strict=True):
            torch.testing.assert_close(a[i], b)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return m(x, labels, weight=w)

    _, pull = torch.func.vjp(run, x.detach(), m.weight.detach())
    for a, b in zip(torch.func.vmap(pull)(gys), batched, strict=True):
        torch.testing.assert_close(a, b)
    tangents = torch.randn_like(x), torch.randn_like(m.weight)
    _, dy = torch.func.jvp(run, (x.detach(), m.weight.detach()), tangents)
    expected = run(tangents[0], m.weight) + run(x, tangents[1])
    torch.testing.assert_close(dy, expected.detach())


def test_a_pin_holds_for_the_derivatives(device: torch.device) -> None:
    m = made(CASES[0], device)
    x = torch.randn(10, m.irreps_in.dim, dtype=torch.float64, device=device, requires_grad=True)
    labels = torch.tensor(LABELS, device=device)
    with multigemm.use("reference"):
        y = m(x, labels)
    with Calls() as calls:
        torch.autograd.grad(y, (x, m.weight), torch.ones_like(y))
    assert not any("native" in name for name in calls.names)


def test_wrong_orders_are_refused(device: torch.device) -> None:
    m = made(CASES[0], device)
    x = torch.randn(10, m.irreps_in.dim, dtype=torch.float64, device=device)
    order = multigemm.sort_by_group(torch.tensor(LABELS, device=device), 5)
    with pytest.raises(multigemm.errors.DTypeError, match="group_sizes must be int32 or int64"):
        m(x, order=order._replace(group_sizes=order.group_sizes.double()))


def test_few_operators(device: torch.device) -> None:
    """Rows are gathered once and written back once for each block, and nothing is put together."""
    m = made(CASES[0], device).requires_grad_(False)
    x = torch.randn(10, m.irreps_in.dim, dtype=torch.float64, device=device)
    order = multigemm.sort_by_group(torch.tensor(LABELS, device=device), 5)
    m(x, order=order)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        m(x, order=order)
    names = [event.name for event in profile.events()]
    assert names.count("aten::index_select") == 4
    assert names.count("aten::mul_") <= 2
    assert not {"aten::cat", "aten::mul", "aten::index", "aten::sort"} & set(names)
