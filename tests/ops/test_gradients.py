"""Gradients to third order, what they cost, and gradients that arrive in awkward memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import Calls
from torch.utils._python_dispatch import TorchDispatchMode

import multigemm

SIZES = [3, 0, 4, 1]


def leaf(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def operands(batch: int | None, shared: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x with two rows that belong to no group, w and bias of four groups."""
    torch.manual_seed(0)
    b = () if batch is None else (batch,)
    own = () if batch is None else ((1,) if shared else (batch,))
    return (
        leaf(10, *b, 3, device=device),
        leaf(4, *own, 3, 2, device=device),
        leaf(4, *own, 2, device=device),
    )


CASES = [(None, False), (2, False), (2, True), (1, True)]


@pytest.mark.parametrize(("batch", "shared"), CASES)
def test_grouped_mm_to_third_order(
    batch: int | None, shared: bool, pinned: str, device: torch.device
) -> None:
    sizes = torch.tensor(SIZES, device=device)
    inputs = operands(batch, shared, device)

    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm(x, w, sizes, bias=bias)

    def first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(product(*tensors).sin().sum(), tensors, create_graph=True)

    assert torch.autograd.gradcheck(product, inputs)
    if pinned == "simt" and batch is not None:
        return  # its host build emulates every thread: thousands of calls of it in one case are enough
    assert torch.autograd.gradgradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(first, inputs)


@pytest.mark.parametrize("sum_batch", [False, True])
def test_grouped_mm_wgrad_to_third_order(sum_batch: bool, pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor(SIZES, device=device).cumsum(0)
    inputs = (leaf(10, 2, 3, device=device), leaf(10, 2, 2, device=device))

    def product(x: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
        return multigemm.grouped_mm_wgrad(x, gy, offsets=offsets, sum_batch=sum_batch)

    def first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(product(*tensors).sin().sum(), tensors, create_graph=True)

    assert torch.autograd.gradcheck(product, inputs)
    if pinned == "simt":
        return  # as above
    assert torch.autograd.gradgradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(first, inputs)


@pytest.mark.parametrize(("wanted", "products", "outer"), [("x", 1, 0), ("w", 0, 1), ("xw", 1, 1)])
def test_only_the_gradients_asked_for_are_computed(
    wanted: str, products: int, outer: int, device: torch.device
) -> None:
    """Frozen weights cost no product in the backward, and their input is not kept."""
    sizes = torch.tensor(SIZES, device=device)
    x, w, _ = (t.detach() for t in operands(None, False, device))
    x.requires_grad_("x" in wanted)
    w.requires_grad_("w" in wanted)
    y = multigemm.grouped_mm(x, w, sizes)
    kept = {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}
    assert (x.data_ptr() in kept) == ("w" in wanted)
    assert (w.data_ptr() in kept) == ("x" in wanted)
    with Calls() as calls:
        y.backward(torch.ones_like(y))
    assert calls.names["multigemm.grouped_mm.default"] == products
    assert calls.names["multigemm.grouped_mm_wgrad.default"] == outer


def test_expanded_gradient(pinned: str, device: torch.device) -> None:
    """``y.sum().backward()`` brings a gradient with strides of zero."""
    x, w, bias = operands(None, False, device)
    sizes = torch.tensor(SIZES, device=device)
    multigemm.grouped_mm(x, w, sizes, bias=bias).sum().backward()
    ones = torch.ones(10, 2, dtype=torch.float64, device=device)
    expected = multigemm.grouped_mm(ones, w.detach().mT, sizes)
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(bias.grad, torch.tensor(SIZES, device=device).double()[:, None].expand(4, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_operands_dtype(dtype: torch.dtype, pinned: str, device: torch.device) -> None:
    """With a wider result the gradient comes in wide and leaves as the operands are."""
    torch.manual_seed(0)
    sizes = torch.tensor([5, 0, 6], device=device)
    x = torch.randn(12, 8, device=device).to(dtype).requires_grad_()
    w = torch.randn(3, 8, 5, device=device).to(dtype).requires_grad_()
    y = multigemm.grouped_mm(x, w, sizes, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == w.grad.dtype == dtype
    torch.testing.assert_close(
        w.grad[0].float(), x[:5].float().sum(0)[:, None].expand(8, 5), atol=0.05, rtol=0.02
    )


def test_pin_holds_in_backward(device: torch.device) -> None:
    """The backward runs on another thread, outside ``use``; it takes the forward's implementation."""
    x, w, _ = operands(None, False, device)
    sizes = torch.tensor(SIZES, device=device)
    with multigemm.use("reference"):
        y = multigemm.grouped_mm(x, w, sizes)
    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith("multigemm.grouped_mm"):
                seen.append(args[-1])
            return func(*args, **(kwargs or {}))

    with Names():
        y.sum().backward()
    assert seen == ["reference", "reference"]


def test_the_operators_themselves_differentiate_to_second_order(device: torch.device) -> None:
    """Public functions record their node without the dispatcher where they can; other callers cannot."""
    x = torch.randn(7, 3, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(3, 3, 2, dtype=torch.float64, device=device, requires_grad=True)
    gy = torch.randn(7, 2, dtype=torch.float64, device=device, requires_grad=True)
    sizes = torch.tensor([3, 0, 2], device=device)

    def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.multigemm.grouped_mm.default(x, w, sizes, False, None, None, "", "")

    def wgrad(x: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
        return torch.ops.multigemm.grouped_mm_wgrad.default(x, gy, sizes, False, False, None, "", "")

    for function, operands in ((rows, (x, w)), (wgrad, (x, gy))):
        assert torch.autograd.gradcheck(function, operands)
        assert torch.autograd.gradgradcheck(function, operands)


def test_the_short_way_of_training_gives_way_to_whatever_looks_on(device: torch.device) -> None:
    x = torch.randn(5, 3, device=device, requires_grad=True)
    w = torch.randn(2, 3, 4, device=device, requires_grad=True)
    plain = multigemm.grouped_mm(x, w, [2, 3])
    gradients = torch.autograd.grad(plain.sum(), (x, w))
    with Calls() as seen:
        watched = multigemm.grouped_mm(x, w, [2, 3])
        again = torch.autograd.grad(watched.sum(), (x, w))
    assert {"multigemm.grouped_mm.default", "multigemm.grouped_mm_wgrad.default"} <= set(seen.names)
    assert torch.equal(plain, watched)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def test_gradients_of_many_directions_at_once(device: torch.device) -> None:
    """`is_grads_batched` maps over gradients by a mechanism of its own, which no transform's stack tells."""
    x, w, _ = operands(None, False, device)
    y = multigemm.grouped_mm(x, w, torch.tensor(SIZES, device=device))
    gy = torch.randn(4, *y.shape, dtype=y.dtype, device=device)
    batched = torch.autograd.grad(y, (x, w), gy, retain_graph=True, is_grads_batched=True)
    singly = [torch.autograd.grad(y, (x, w), one, retain_graph=True) for one in gy]
    for together, each in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(each))
