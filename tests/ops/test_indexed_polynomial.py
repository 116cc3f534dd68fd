"""indexed_polynomial: every kernel against a sum over terms, derivatives to the fourth, batches, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import multigemm
from multigemm import _route_polynomial
from multigemm.equivariant._terms import Setting, Terms, shared, terms
from multigemm.ops.indexed_polynomial import Polynomial, indexed_polynomial

GROUPS = 4
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["reference", "native", "simt", ""])
def kernel(request: pytest.FixtureRequest, device: torch.device) -> str:
    name = str(request.param)
    if name in ("native", "simt") and not _route_polynomial.served(device):
        pytest.skip(_route_polynomial.why_not(device))
    return name


def case(
    kernel: str,
    device: torch.device,
    rows: int = 6,
    channels: int = 3,
    outputs: tuple[str, ...] = ("1x0e", "1x1o"),
    inputs: str = "1x0e+1x1o",
    dtype: torch.dtype = torch.float64,
) -> tuple[Polynomial, torch.Tensor, torch.Tensor, Terms]:
    """Columns of x in the order of components, those of y in the order of channels."""
    torch.manual_seed(0)
    setting = Setting(inputs, outputs, (3,) * len(outputs), False)
    found, few = terms(setting), shared(setting)
    places = [[i * channels, 1] for i in range(found.width)]
    places += [[o, found.components] for o in range(found.components)]
    labels = torch.randint(-1, GROUPS + 1, (rows,)).to(device)
    numbers = few.factors.to(dtype), few.entries, few.entry_ends
    tables = (t.to(device) for t in (found.heads, few.pairs, few.last, *numbers, torch.tensor(places)))
    x = torch.randn(rows, found.width * channels, dtype=torch.float64).to(dtype).to(device)
    w = torch.randn(GROUPS, len(few.entry_ends), channels, dtype=torch.float64).to(dtype).to(device)
    return Polynomial(labels, None, None, *tables, 0, kernel), x, w, found


def dense(p: Polynomial, found: Terms) -> Call:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values = x.unflatten(-1, (found.width, w.shape[-1]))
        values = torch.cat([values, torch.ones_like(values[..., :1, :])], -2)
        d, i, j, k, t = p.entries.long().unbind(1)
        weight = torch.searchsorted(p.entry_ends.long(), torch.arange(len(t), device=t.device), right=True)
        known = (p.labels >= 0) & (p.labels < w.shape[-3])
        own = w.index_select(-3, p.labels.clamp(0, w.shape[-3] - 1)) * known[:, None, None]
        own = own.index_select(-2, weight) * p.factors.to(w.dtype)[t, None]
        products = own * values[..., i, :] * values[..., j, :] * values[..., k, :]
        one_hot = torch.nn.functional.one_hot(d, found.components).to(x.dtype)
        return torch.einsum("...tc,td->...cd", products, one_hot).flatten(-2)

    return call


def ours(p: Polynomial) -> Call:
    return lambda x, w: indexed_polynomial(x, w, p)


@pytest.mark.parametrize("channels", [1, 3, 8, 19])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(channels: int, dtype: torch.dtype, kernel: str, device: torch.device, poisoned: None) -> None:
    outputs = ("1x0e", "1x1o", "1x4e")
    p, x, w, found = case(kernel, device, 37, channels, outputs, "1x0e+1x1o+1x2e", dtype)
    expected = dense(p, found)(x.double(), w.double())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(ours(p)(x, w).double(), expected, rtol=tolerance, atol=tolerance)


def test_derivatives_to_the_fourth_order(kernel: str, device: torch.device, poisoned: None) -> None:
    p, x, w, found = case(kernel, device)
    x.requires_grad_()
    w.requires_grad_()

    def levels(call: Call) -> list[tuple[torch.Tensor, ...]]:
        level: tuple[torch.Tensor, ...] = (call(x, w),)
        result = [level]
        for order in range(4):
            total = sum((t.tanh() if order == 0 else t.square()).sum() for t in level)
            level = torch.autograd.grad(total, (x, w), create_graph=True)
            result.append(level)
        return result

    for a, b in zip(levels(ours(p)), levels(dense(p, found)), strict=True):
        for s, t in zip(a, b, strict=True):
            torch.testing.assert_close(s, t, rtol=1e-10, atol=1e-13 * t.abs().max().item())


def test_the_same_call_gives_the_same_bits(kernel: str, device: torch.device) -> None:
    if kernel == "reference" and device.type != "cpu":
        pytest.skip("the reference adds by PyTorch's index_add, which takes any order on a GPU")
    p, x, w, _ = case(kernel, device, 300, 19)
    x.requires_grad_()
    w.requires_grad_()
    results = [torch.autograd.grad(ours(p)(x, w).square().sum(), (x, w)) for _ in range(2)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


TRANSFORMS = {
    "hessian": lambda f: torch.func.hessian(f),
    "hessian in w": lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=1), argnums=1),
    "mixed": lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=1)),
    "forward over reverse": lambda f: torch.func.jacfwd(torch.func.jacrev(f, argnums=1), argnums=1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, kernel: str, device: torch.device) -> None:
    p, x, w, found = case(kernel, device, 4, 2)
    mine, other = (
        TRANSFORMS[name](lambda x, w, f=f: f(x, w).sin().sum()) for f in (ours(p), dense(p, found))
    )
    torch.testing.assert_close(mine(x, w), other(x, w))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_batches(dims: tuple[int | None, int | None], kernel: str, device: torch.device) -> None:
    p, x, w, found = case(kernel, device)
    x = torch.stack([x, x * 2, x - 1]) if dims[0] == 0 else x
    w = torch.stack([w, w * 2, w - 1]) if dims[1] == 0 else w
    mine = torch.func.vmap(lambda x, w: torch.func.grad(lambda w: ours(p)(x, w).sin().sum())(w), dims)
    other = torch.func.vmap(
        lambda x, w: torch.func.grad(lambda w: dense(p, found)(x, w).sin().sum())(w), dims
    )
    torch.testing.assert_close(mine(x, w), other(x, w))


def test_a_given_order_and_any_strides(kernel: str, device: torch.device) -> None:
    p, x, w, found = case(kernel, device, 30)
    order = multigemm.sort_by_group(p.labels, GROUPS)
    q = p._replace(permutation=order.permutation, group_sizes=order.group_sizes)
    wide = torch.stack([x, x], 2)[:, :, 0].requires_grad_()
    turned = w.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    mine = torch.autograd.grad(ours(q)(wide, turned).sum(), (wide, turned))  # the cotangent has stride 0
    x.requires_grad_()
    w.requires_grad_()
    other = torch.autograd.grad(dense(p, found)(x, w).sum(), (x, w))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled(kernel: str, device: torch.device) -> None:
    p, x, w, _ = case(kernel, device)
    compiled = torch.compile(ours(p), fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    a, b = (torch.autograd.grad(f(x, w).sin().sum(), x)[0] for f in (compiled, ours(p)))
    torch.testing.assert_close(a, b)


def test_bad_calls_say_what_is_wrong(device: torch.device) -> None:
    p, x, w, _ = case("", device)
    with pytest.raises(multigemm.errors.ShapeError, match=r"w \[G, \d+, C\]"):
        indexed_polynomial(x, w[:, 1:], p)
    with pytest.raises(multigemm.errors.DTypeError, match="float64 or float32"):
        indexed_polynomial(x.half(), w.half(), p)
    with pytest.raises(multigemm.errors.DTypeError, match="factors must be of the dtype of x"):
        indexed_polynomial(x.float(), w.float(), p)
    with pytest.raises(multigemm.errors.ShapeError, match="labels must be int64"):
        indexed_polynomial(x, w, p._replace(labels=p.labels.int()))


@pytest.mark.parametrize("outputs", [("1x0e",), ("1x0e", "1x1o"), ("1x2e", "1x0o", "1x1e"), ("1x5e",)])
@pytest.mark.parametrize("correlation", [1, 2, 3])
def test_few_weights_stand_for_the_coefficients(outputs: tuple[str, ...], correlation: int) -> None:
    setting = Setting("1x0e+1x1o+1x2e", outputs, (correlation,) * len(outputs), False)
    found, few = terms(setting), shared(setting)
    counts = [len(m) for m in few.mixtures]
    assert counts == [int(torch.linalg.matrix_rank(t)) if t.numel() else 0 for t in found.coefficients]
    wide = torch.block_diag(*found.coefficients)
    expansion = torch.zeros(len(found.last), sum(counts), dtype=torch.float64)
    pairs = torch.repeat_interleave(torch.arange(len(few.pairs)), (few.pairs[:, 2] - few.pairs[:, 1]).long())
    of_pair = found.pairs[:, 1].long()[pairs]
    for pair, first, (k, weight), factor in zip(pairs, of_pair, few.last, few.factors, strict=True):
        end = int(found.pairs[pair, 2])
        place = int(first) + found.last[first:end].tolist().index(int(k))
        expansion[place, weight] += factor
    torch.testing.assert_close(expansion @ torch.block_diag(*few.mixtures), wide, rtol=0, atol=1e-12)
    assert len(few.factors) <= 2 * len(found.last)
    assert few.entries[:, 4].sort().values.tolist() == list(range(len(few.factors)))
    assert torch.equal(few.last[few.entries[:, 4].long(), 0], few.entries[:, 3])
    ends = torch.bincount(few.last[:, 1].long(), minlength=sum(counts)).cumsum(0)
    assert torch.equal(few.entry_ends.long(), ends)
