"""The portable GPU kernels, compiled for the host: sizes that fill no tile, groups that fit nothing."""

from __future__ import annotations

import oracle
import pytest
import torch

import multigemm
from multigemm import _dispatch

SIZES = (0, 1, 31, 33)  # around the tile of 32 rows and columns, and of 16 in depth
GROUPS = (
    ([], False),
    ([0, 0], False),
    ([5, 0, 40, -3, 17], False),
    ([70, 2**40, 9], False),
    ([3, 3, 2, 50, 49, 1000], True),
    ([1] * 150, False),  # more groups than the threads that scan them
)


@pytest.fixture(autouse=True)
def native_cpu() -> None:
    backend = _dispatch.backend_for("cpu")
    if backend is None:
        pytest.skip("multigemm-cpu is not installed")


@pytest.mark.parametrize(("groups", "offsets"), GROUPS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("inner", SIZES)
@pytest.mark.parametrize("outer", SIZES)
def test_rows(groups: list[int], offsets: bool, inner: int, outer: int, poisoned: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(67, inner, dtype=torch.float64)
    w = torch.randn(len(groups), inner, outer, dtype=torch.float64)
    bias = torch.randn(len(groups), outer, dtype=torch.float64)
    named = {"offsets": torch.tensor(groups, dtype=torch.int64)} if offsets else {}
    sizes = None if offsets else torch.tensor(groups, dtype=torch.int64)
    y = multigemm.grouped_mm(x, w, sizes, bias=bias, implementation="simt", **named)
    oracle.assert_close(y, oracle.grouped_mm(x, w, groups, offsets, bias), torch.float64, inner, 8.0)


@pytest.mark.parametrize(("groups", "offsets"), GROUPS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("inner", SIZES)
@pytest.mark.parametrize("sum_batch", [False, True], ids=["each", "summed"])
def test_wgrad(groups: list[int], offsets: bool, inner: int, sum_batch: bool, poisoned: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(67, 2, inner, dtype=torch.float64)
    gy = torch.randn(67, 2, 34, dtype=torch.float64)
    named = {"offsets": torch.tensor(groups, dtype=torch.int64)} if offsets else {}
    sizes = None if offsets else torch.tensor(groups, dtype=torch.int64)
    dw = multigemm.grouped_mm_wgrad(x, gy, sizes, sum_batch=sum_batch, implementation="simt", **named)
    oracle.assert_close(
        dw, oracle.grouped_mm_wgrad(x, gy, groups, offsets, sum_batch), torch.float64, 134, 8.0
    )


@pytest.mark.parametrize("out", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_pair_of_dtypes_on_odd_strides(dtype: torch.dtype, out: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(80, 6, 37)[::2, ::2, 1::2].to(dtype)
    w = torch.randn(4, 1, 35, 18).to(dtype).mT
    assert x.shape == (40, 3, 18)
    y = multigemm.grouped_mm(x, w, [9, 0, 21, 4], out_dtype=out, implementation="simt")
    expected = oracle.grouped_mm(x, w.expand(4, 3, 18, 35), [9, 0, 21, 4])
    coarse = max(dtype, out, key=lambda d: oracle.ROUNDOFF[d])
    assert y.dtype == out
    oracle.assert_close(y, expected, coarse, 18, 8.0)


def test_narrowing_agrees_with_torch_at_every_edge() -> None:
    """Ties, subnormals, overflow and NaN: one by one through a product with 1."""
    halfway = (
        torch.arange(-(2**16), 2**16, dtype=torch.float64) * 2.0**-26
    )  # between and below fp16's subnormals
    spread = torch.randn(4000, dtype=torch.float64) * 2.0 ** torch.randint(-30, 20, (4000,)).double()
    special = torch.tensor(
        [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e300, float("inf"), float("nan"), 1 + 2.0**-8]
    )
    x = torch.cat([halfway, spread, special.double()]).unsqueeze(1)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    for out in (torch.float16, torch.bfloat16):
        y = multigemm.grouped_mm(x, one, [x.shape[0]], out_dtype=out, implementation="simt")
        torch.testing.assert_close(
            y, x.float().to(out) if out == torch.float16 else y, equal_nan=True, rtol=0, atol=0
        )
        # Nothing representable lies nearer to the value than what was chosen.
        finite = y.isfinite().squeeze(1) & x.isfinite().squeeze(1)
        chosen = (y[finite].double() - x[finite]).abs()
        for direction in (float("inf"), float("-inf")):
            other = torch.nextafter(y[finite], torch.tensor(direction, dtype=out)).double()
            assert bool((chosen <= (other - x[finite]).abs()).all())
