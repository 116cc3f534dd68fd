"""Forward-mode derivatives: the failure is a tangent that is lost without a word."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import multigemm
from multigemm import errors

SIZES = [3, 0, 4, 1]


def operands(batch: int | None, shared: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x with two rows that belong to no group, w and bias of four groups."""
    torch.manual_seed(0)
    b = () if batch is None else (batch,)
    own = () if batch is None else ((1,) if shared else (batch,))
    shapes = ((10, *b, 3), (4, *own, 3, 2), (4, *own, 2))
    return tuple(torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes)


@pytest.mark.parametrize(("batch", "shared"), [(None, False), (2, False), (2, True)])
def test_every_order_of_modes(batch: int | None, shared: bool, pinned: str, device: torch.device) -> None:
    sizes = torch.tensor(SIZES, device=device)
    leaves = [t.requires_grad_() for t in operands(batch, shared, device)]

    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm(x, w, sizes, bias=bias)

    assert torch.autograd.gradcheck(product, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("shared", [False, True])
def test_the_weight_gradient(shared: bool, pinned: str, device: torch.device) -> None:
    sizes = torch.tensor(SIZES, device=device)
    torch.manual_seed(1)
    x, gy = (torch.randn(10, 2, c, dtype=torch.float64, device=device, requires_grad=True) for c in (3, 2))

    def wgrad(x: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm_wgrad(x, gy, sizes, sum_batch=shared)

    assert torch.autograd.gradcheck(wgrad, (x, gy), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(wgrad, (x, gy), check_fwd_over_rev=True)


def test_torch_func(pinned: str, device: torch.device) -> None:
    """A Hessian is forward over reverse, level by level."""
    sizes = torch.tensor(SIZES, device=device)
    x, w, _ = operands(None, False, device)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm(x, w, sizes).sin().sum()

    backward_twice = torch.func.jacrev(torch.func.jacrev(energy))(x)
    torch.testing.assert_close(torch.func.hessian(energy)(x), backward_twice)
    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(energy))(x), backward_twice)


def test_a_tangent_in_another_dtype_of_the_result(device: torch.device) -> None:
    x, w, _ = (t.float() for t in operands(None, False, device))
    sizes, tangent = torch.tensor(SIZES, device=device), torch.ones_like(x)
    y, dy = torch.func.jvp(
        lambda x: multigemm.grouped_mm(x, w, sizes, out_dtype=torch.float64), (x,), (tangent,)
    )
    assert y.dtype == dy.dtype == torch.float64
    torch.testing.assert_close(dy, multigemm.grouped_mm(tangent, w, sizes, out_dtype=torch.float64))


def test_out_is_refused(device: torch.device) -> None:
    x, w, _ = operands(None, False, device)
    sizes = torch.tensor(SIZES, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(errors.OptionError, match="not differentiable"):
            multigemm.grouped_mm(dual, w, sizes, out=x.new_empty(10, 2))


@pytest.mark.parametrize("outer", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("inner", ["jacfwd", "jacrev"])
def test_mixed_derivatives_at_two_levels(inner: str, outer: str, pinned: str, device: torch.device) -> None:
    """Of one operand inside and of the other one outside; the inner level must not hide the outer one."""
    outside, inside = getattr(torch.func, outer), getattr(torch.func, inner)
    sizes = torch.tensor([1, 2], device=device)
    x, w = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
    x, w, gy = x.to(device), w.to(device), torch.randn(3, 3, dtype=torch.float64).to(device)

    def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm(x, w, sizes)

    def rows_by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1] @ w[0], x[1:] @ w[1]])

    def wgrad(x: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm_wgrad(x, gy, sizes)

    def wgrad_by_hand(x: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:1].mT @ gy[:1], x[1:].mT @ gy[1:]])

    for ours, by_hand, other in ((rows, rows_by_hand, w), (wgrad, wgrad_by_hand, gy)):
        for first, second in ((0, 1), (1, 0)):
            found = outside(inside(ours, argnums=second), argnums=first)(x, other)
            expected = outside(inside(by_hand, argnums=second), argnums=first)(x, other)
            assert expected.any()
            torch.testing.assert_close(found, expected)
