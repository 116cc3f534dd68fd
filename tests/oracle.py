"""The products in float64, row by row, written without the package: what tests compare with."""

from __future__ import annotations

import torch

# Unit roundoff of a dtype: the tolerance is  4 * roundoff * sqrt(length of the sum + 1)  times the size of
# the terms, for every test and implementation alike. A sum of n terms one after the other adds up to
# n/4 * roundoff of its accumulator: each addition rounds a partial sum, which grows as sqrt(n).
ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
DTYPES = tuple(ROUNDOFF)


def ends(groups: list[int], offsets: bool, rows: int) -> list[int]:
    """Cumulative ends after clamping: what sizes and offsets mean when they are out of range."""
    result, total = [], 0
    for value in groups:
        total = max(total, value) if offsets else total + max(value, 0)
        total = min(total, rows)
        result.append(total)
    return result


def labels(groups: list[int], offsets: bool, rows: int) -> list[int]:
    """The group of each row, -1 past the last."""
    result = [-1] * rows
    start = 0
    for g, end in enumerate(ends(groups, offsets, rows)):
        for n in range(start, end):
            result[n] = g
        start = end
    return result


def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    groups: list[int],
    offsets: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    x, w = x.detach().cpu().double(), w.detach().cpu().double()
    y = torch.zeros(*x.shape[:-1], w.shape[-1], dtype=torch.float64)
    for n, g in enumerate(labels(groups, offsets, x.shape[0])):
        if g >= 0:
            y[n] = (x[n].unsqueeze(-2) @ w[g]).squeeze(-2) if x.dim() == 3 else x[n] @ w[g]
            if bias is not None:
                y[n] += bias[g].detach().cpu().double()
    return y


def grouped_mm_wgrad(
    x: torch.Tensor, gy: torch.Tensor, groups: list[int], offsets: bool = False, sum_batch: bool = False
) -> torch.Tensor:
    x, gy = x.detach().cpu().double(), gy.detach().cpu().double()
    dw = torch.zeros(len(groups), *x.shape[1:], gy.shape[-1], dtype=torch.float64)
    for n, g in enumerate(labels(groups, offsets, x.shape[0])):
        if g >= 0:
            dw[g] += x[n].unsqueeze(-1) * gy[n].unsqueeze(-2)
    return dw.sum(1, keepdim=True) if sum_batch else dw


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, terms: int, size: float = 1.0
) -> None:
    """``dtype`` is the narrowest that took part, ``terms`` the length of each sum, ``size`` of a term."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.numel() == 0:
        return
    adding = min(ROUNDOFF[dtype], ROUNDOFF[torch.float32]) * terms / 4
    bound = size * (4 * ROUNDOFF[dtype] * (terms + 1) ** 0.5 + adding) + ROUNDOFF[dtype] * expected.abs()
    error = (actual.detach().cpu().double() - expected).abs()
    assert bool((error <= bound).all()), f"error {(error - bound).max().item():.3e} above the bound"
