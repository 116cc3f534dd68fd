"""The call styles of torch and of the grouped_gemm package."""

from __future__ import annotations

import pytest
import torch

from multigemm import errors
from multigemm.compat import grouped_gemm, grouped_mm

OFFS = torch.tensor([8, 8, 24], dtype=torch.int32)


def operands(form: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    a, b = {
        "2x3": ((24, 16), (3, 16, 32)),
        "2x2": ((16, 24), (24, 32)),
        "3x2": ((3, 16, 32), (32, 24)),
        "3x3": ((3, 8, 16), (3, 16, 32)),
    }[form]
    offs = None if form == "3x3" else OFFS
    return torch.randn(a).to(dtype).requires_grad_(), torch.randn(b).to(dtype).requires_grad_(), offs


@pytest.mark.parametrize("form", ["2x3", "2x2", "3x2", "3x3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch(form: str, dtype: torch.dtype) -> None:
    """Values and gradients of torch.nn.functional.grouped_mm, where it takes the case."""
    a, b, offs = operands(form, dtype)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.02}
    ours = grouped_mm(a, b, offs=offs)
    theirs = torch.nn.functional.grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(ours, theirs, **tolerance)
    gradient = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, (a, b), gradient),
        torch.autograd.grad(theirs, (a, b), gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("form", ["2x3", "2x2", "3x2", "3x3"])
def test_fp64_to_second_order(form: str) -> None:
    a, b, offs = operands(form, torch.float64)
    a, b = a.detach()[..., :5], b.detach()
    b = b[..., :5, :] if form in ("2x3", "3x3") else b
    if form == "2x2":
        a, b, offs = a, b[:5], torch.tensor([2, 2, 5])
    if form == "3x2":
        b, offs = b[:5, :7], torch.tensor([2, 2, 5])
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda a, b: grouped_mm(a, b, offs=offs), (a, b))


@pytest.mark.parametrize(
    ("form", "bias"),
    [("2x3", (32,)), ("2x3", (3, 32)), ("3x3", (3, 32)), ("2x2", (3, 32)), ("2x2", (32,)), ("3x2", (24,))],
)
def test_bias_and_out_dtype(form: str, bias: tuple[int, ...]) -> None:
    a, b, offs = operands(form, torch.bfloat16)
    added = torch.randn(bias).bfloat16()
    y = grouped_mm(a, b, offs=offs, bias=added, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    plain = grouped_mm(a.float(), b.float(), offs=offs)
    if form == "2x3" and len(bias) == 2:
        rows = torch.repeat_interleave(added.float(), torch.tensor([8, 0, 16]), dim=0)
    elif len(bias) == 2:
        rows = added.float()[:, None]
    else:
        rows = added.float()
    torch.testing.assert_close(y, plain + rows, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("trans_b", [False, True])
def test_gmm(trans_b: bool) -> None:
    torch.manual_seed(0)
    a = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, *((5, 4) if trans_b else (4, 5)), dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor([2, 0, 7])
    y = grouped_gemm.ops.gmm(a, b, sizes, trans_b)
    w = b.mT if trans_b else b
    torch.testing.assert_close(y, torch.cat([a[:2] @ w[0], a[2:] @ w[2]]))
    assert torch.autograd.gradgradcheck(lambda a, b: grouped_gemm.gmm(a, b, sizes, trans_b=trans_b), (a, b))


def test_gmm_with_transposed_blocks() -> None:
    a, b, sizes = torch.randn(9, 4), torch.randn(9, 5), torch.tensor([2, 0, 7])
    y = grouped_gemm.gmm(a, b, sizes, trans_a=True)
    torch.testing.assert_close(y, torch.stack([a[:2].T @ b[:2], torch.zeros(4, 5), a[2:].T @ b[2:]]))


def test_refused() -> None:
    a, b = torch.zeros(6, 4), torch.zeros(3, 4, 5)
    with pytest.raises(errors.GroupSizesError, match="offs must be given unless both matrices are 3-D"):
        grouped_mm(a, b)
    with pytest.raises(errors.GroupSizesError, match="offs must be None where both matrices are 3-D"):
        grouped_mm(torch.zeros(3, 2, 4), b, offs=OFFS)
    with pytest.raises(errors.ShapeError, match="must be 2-D or 3-D, got 1-D and 3-D"):
        grouped_mm(torch.zeros(4), b, offs=OFFS)
    with pytest.raises(
        errors.ShapeError, match=r"the inner sizes must agree, got mat_a \[6, 4\] and mat_b \[5, 4\]"
    ):
        grouped_mm(a, torch.zeros(5, 4), offs=OFFS)
    with pytest.raises(errors.ShapeError, match="must have the same first size"):
        grouped_mm(torch.zeros(2, 2, 4), b)
    with pytest.raises(errors.ShapeError, match=r"bias must have shape \[5\] or \[3, 5\], got \[4\]"):
        grouped_mm(a, b, offs=OFFS, bias=torch.zeros(4))
    with pytest.raises(errors.ShapeError, match="trans_a and trans_b exclude each other"):
        grouped_gemm.gmm(a, b, OFFS, trans_a=True, trans_b=True)
