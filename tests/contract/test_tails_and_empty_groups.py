"""Memory that a product does not own: rows past the last group and matrices of empty groups.

The failure: uninitialised rows past the last offset in the output and the gradient, which turn into NaN
once the allocator recycles blocks, and weight gradients of empty groups that are not zero.
https://github.com/pytorch/pytorch/issues/193633 https://github.com/pytorch/pytorch/issues/154557
https://github.com/pytorch/pytorch/issues/172439 https://github.com/pytorch/pytorch/pull/192497
https://github.com/huggingface/transformers/pull/45621
"""

from __future__ import annotations

import oracle
import pytest
import torch

import multigemm

pytestmark = pytest.mark.usefixtures("poisoned")

CASES = [[3, 0, 4], [0, 0, 0], [0, 5, 0], [1, 0, 1], []]


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_zeros_where_nothing_belongs(sizes, batch, dtype, pinned: str, device: torch.device) -> None:
    b = () if batch is None else (batch,)
    s = torch.tensor(sizes, dtype=torch.int64, device=device)
    x = torch.randn(11, *b, 5, device=device).to(dtype).requires_grad_()
    w = torch.randn(len(sizes), *b, 5, 6, device=device).to(dtype).requires_grad_()
    bias = torch.randn(len(sizes), *b, 6, device=device).to(dtype).requires_grad_()
    for _ in range(2):  # the second time over recycled memory
        y = multigemm.grouped_mm(x, w, s, bias=bias)
        rows = sum(sizes)
        assert torch.equal(y[rows:], torch.zeros_like(y[rows:]))
        gx, gw, gbias = torch.autograd.grad(y, (x, w, bias), torch.randn_like(y))
        assert torch.equal(gx[rows:], torch.zeros_like(gx[rows:]))
        for g, size in enumerate(sizes):
            if size == 0:
                assert torch.equal(gw[g], torch.zeros_like(gw[g]))
                assert torch.equal(gbias[g], torch.zeros_like(gbias[g]))
        for t in (y, gx, gw, gbias):
            assert not t.isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_past_the_groups_are_not_read(value: float, pinned: str, device: torch.device) -> None:
    """Whatever stands in rows that belong to no group, it does not leak into any result."""
    s = torch.tensor([2, 0, 3], device=device)
    x = torch.randn(9, 4, device=device)
    gy = torch.randn(9, 6, device=device)
    x[5:], gy[5:] = value, value
    w = torch.randn(3, 4, 6, device=device)
    assert torch.equal(multigemm.grouped_mm(x, w, s)[5:], torch.zeros(4, 6, device=device))
    dw = multigemm.grouped_mm_wgrad(x, gy, s)
    torch.testing.assert_close(dw, multigemm.grouped_mm_wgrad(x[:5], gy[:5], s))


def test_weights_of_empty_groups_are_not_read(pinned: str, device: torch.device) -> None:
    w = torch.randn(3, 4, 6, device=device)
    w[1] = float("nan")
    y = multigemm.grouped_mm(torch.randn(5, 4, device=device), w, torch.tensor([2, 0, 3], device=device))
    assert not y.isnan().any()


def test_inner_size_of_zero_gives_zeros_or_the_bias(pinned: str, device: torch.device) -> None:
    s = torch.tensor([2, 1], device=device)
    x, w = torch.randn(4, 0, device=device), torch.randn(2, 0, 3, device=device)
    assert torch.equal(multigemm.grouped_mm(x, w, s), torch.zeros(4, 3, device=device))
    bias = torch.tensor([[1.0, 2, 3], [4, 5, 6]], device=device)
    y = multigemm.grouped_mm(x, w, s, bias=bias)
    assert torch.equal(y, torch.stack([bias[0], bias[0], bias[1], torch.zeros(3, device=device)]))


def test_out_is_written_whole(pinned: str, device: torch.device) -> None:
    out = torch.full((6, 3), float("nan"), device=device)
    multigemm.grouped_mm(torch.ones(6, 2, device=device), torch.ones(2, 2, 3, device=device), [1, 2], out=out)
    assert torch.equal(out, torch.tensor([2.0, 2, 2, 0, 0, 0], device=device)[:, None].expand(6, 3))
