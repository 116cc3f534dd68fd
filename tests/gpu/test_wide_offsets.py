"""Operands of more than 2^31 elements, in x, in w, in y and in dw, really filled, checked on sampled rows."""

from __future__ import annotations

import oracle
import pytest
import torch
from gpu import kit

import multigemm

pytestmark = pytest.mark.usefixtures("room")

TALL, LONG, SHORT = 2**20 + 3000, 2056, 16  # TALL x LONG passes 2^31
MANY, INNER, OUTER = 1024, 2056, 1032  # so does MANY x INNER x OUTER
NAMES = (None, "native", "blas", "simt")
SIZES = [300_000, 0, 2**19, 200_000]


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def sampled(rows: int) -> list[int]:
    """Rows at both ends, on both sides of 2^31 elements, and some between."""
    edge = 2**31 // LONG
    return [n for n in (0, 1, 299_999, 300_000, edge - 1, edge, edge + 1, rows - 1) if n < rows]


def group_of(row: int) -> int:
    return next((g for g, end in enumerate(oracle.ends(SIZES, False, TALL)) if row < end), -1)


def check_rows(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> None:
    for n in sampled(x.shape[0]):
        g = group_of(n)
        if g < 0:
            assert not y[n].any()
        else:
            oracle.assert_close(y[n], (x[n].double() @ w[g].double()).cpu(), dtype, x.shape[1], 16.0)
    assert not y[sum(SIZES) :].any()


@pytest.mark.parametrize("dtype", kit.HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_x_and_the_rows_of_dw(name: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = normal(TALL, LONG, dtype=dtype)
    assert x.numel() > 2**31
    sizes = torch.tensor(SIZES, device="cuda")
    w = normal(4, LONG, SHORT, dtype=dtype)
    check_rows(multigemm.grouped_mm(x, w, sizes, implementation=name), x, w, dtype)
    gy = normal(TALL, SHORT, dtype=dtype)
    dw = multigemm.grouped_mm_wgrad(x, gy, sizes, implementation=name)
    start = 0
    for g, size in enumerate(SIZES):
        some = x[start : start + size, ::257].double().mT @ gy[start : start + size].double()
        oracle.assert_close(dw[g, ::257], some.cpu(), dtype, max(size, 1), 16.0)
        start += size


@pytest.mark.parametrize("dtype", kit.HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_y_and_gy(name: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = normal(TALL, SHORT, dtype=dtype), normal(4, SHORT, LONG, dtype=dtype)
    sizes = torch.tensor(SIZES, device="cuda")
    y = torch.full((TALL, LONG), float("nan"), dtype=dtype, device="cuda")
    multigemm.grouped_mm(x, w, sizes, out=y, implementation=name)
    assert y.numel() > 2**31 and not any(part.isnan().any() for part in y.chunk(8))
    check_rows(y, x, w, dtype)
    x = normal(TALL, SHORT, dtype=dtype)  # of its own: with the first one dw grows as the rows, past float16
    dw = multigemm.grouped_mm_wgrad(x, y, sizes, implementation=name)
    start = 0
    for g, size in enumerate(SIZES):
        some = x[start : start + size].double().mT @ y[start : start + size, ::257].double()
        largest = 16.0 * float(y[start : start + size, ::257].abs().max()) if size else 1.0
        oracle.assert_close(dw[g, :, ::257], some.cpu(), dtype, max(size, 1), largest)
        start += size


@pytest.mark.parametrize("dtype", kit.HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_w_and_dw(name: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts = [3] * (MANY - 4) + [0, 200, 300, 1]
    rows = sum(counts) + 2
    sizes = torch.tensor(counts, device="cuda")
    labels = oracle.labels(counts, False, rows)
    w = normal(MANY, INNER, OUTER, dtype=dtype)
    assert w.numel() > 2**31
    x, gy = normal(rows, INNER, dtype=dtype), normal(rows, OUTER, dtype=dtype)
    some = [0, 5, rows // 2, rows - 300, rows - 4, rows - 3, rows - 2, rows - 1]
    y = multigemm.grouped_mm(x, w, sizes, implementation=name)
    gx = multigemm.grouped_mm(gy, w.mT, sizes, implementation=name)
    for n in some:
        g = labels[n]
        if g < 0:
            assert not y[n].any() and not gx[n].any()
            continue
        oracle.assert_close(y[n], (x[n].double() @ w[g].double()).cpu(), dtype, INNER, 16.0)
        oracle.assert_close(gx[n], (gy[n].double() @ w[g].double().mT).cpu(), dtype, OUTER, 16.0)
    del w, y, gx
    dw = torch.full((MANY, INNER, OUTER), float("nan"), dtype=dtype, device="cuda")
    multigemm.grouped_mm_wgrad(x, gy, sizes, out=dw, implementation=name)
    assert not any(part.isnan().any() for part in dw.chunk(8))
    ends = torch.tensor(counts).cumsum(0).tolist()
    for g in (0, 1, MANY // 2, MANY - 4, MANY - 3, MANY - 2, MANY - 1):
        rows_of = slice(ends[g] - counts[g], ends[g])
        expected = (x[rows_of].double().mT @ gy[rows_of].double()).cpu()
        oracle.assert_close(dw[g], expected, dtype, max(counts[g], 1), 16.0)
