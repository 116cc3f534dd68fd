"""Values of both operators against float64, over random sizes, strides, dtypes and groups."""

from __future__ import annotations

import hypothesis.strategies as st
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import multigemm

SETTINGS = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def strided(shape: tuple[int, ...], dtype: torch.dtype, style: str, device: torch.device) -> torch.Tensor:
    """Random values of ``shape`` in memory as awkward as a user may bring."""
    if style == "contiguous":
        return torch.randn(shape, device=device).to(dtype)
    if style == "transposed":
        return torch.randn((*shape[:-2], shape[-1], shape[-2]), device=device).to(dtype).mT
    if style == "reversed":  # every dimension in the opposite order of memory
        return (
            torch.randn(tuple(reversed(shape)), device=device).to(dtype).permute(*reversed(range(len(shape))))
        )
    if style == "sliced":  # odd start, gaps in every dimension
        wide = torch.randn(tuple(2 * n + 3 for n in shape), device=device).to(dtype)
        return wide[tuple(slice(1, 2 * n + 1, 2) for n in shape)]
    if style == "expanded":
        return torch.randn((1, *shape[1:]), device=device).to(dtype).expand(shape)
    if style == "scalar":  # all strides zero
        return torch.randn((), device=device).to(dtype).expand(shape)
    if style == "unaligned":
        flat = torch.randn(1 + torch.Size(shape).numel(), device=device).to(dtype)
        return flat[1:].view(shape)
    raise ValueError(style)


STYLES = ("contiguous", "transposed", "reversed", "sliced", "expanded", "scalar", "unaligned")
WIDTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64, 65])


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    many = draw(st.booleans())
    groups = draw(st.lists(st.integers(0, 1 if many else 9), max_size=150 if many else 6))
    rest = draw(st.sampled_from([0, 0, 1, 4]))
    return {
        "groups": groups,
        "rows": sum(groups) + rest,
        "batch": draw(st.sampled_from([None, None, 0, 1, 2, 5])),
        "shared": draw(st.booleans()),
        "k": draw(WIDTHS),
        "m": draw(WIDTHS),
        "dtype": draw(st.sampled_from(oracle.DTYPES)),
        "styles": draw(st.tuples(*[st.sampled_from(STYLES)] * 3)),
        "offsets": draw(st.booleans()),
        "index": draw(st.sampled_from([torch.int32, torch.int64])),
        "bias": draw(st.booleans()),
        "out_dtype": draw(st.sampled_from([None, None, None, torch.float32, torch.float64, torch.bfloat16])),
        "seed": draw(st.integers(0, 1000)),
    }


def group_tensor(p: dict, device: torch.device) -> torch.Tensor:
    groups = torch.tensor(p["groups"], dtype=torch.int64)
    if p["offsets"]:
        groups = groups.cumsum(0)
    wide = torch.zeros(2 * len(groups), dtype=p["index"], device=device)
    wide[::2] = groups.to(device)
    return wide[::2] if p["seed"] % 2 else wide[::2].contiguous()


def narrowest(*dtypes: torch.dtype | None) -> torch.dtype:
    return max((d for d in dtypes if d is not None), key=oracle.ROUNDOFF.__getitem__)


@SETTINGS
@given(p=problems())
def test_grouped_mm(p: dict, implementation: str, device: torch.device) -> None:
    torch.manual_seed(p["seed"])
    g, b, k, m = len(p["groups"]), p["batch"], p["k"], p["m"]
    batch = () if b is None else (b,)
    own = () if b is None else ((1,) if p["shared"] else (b,))
    x = strided((p["rows"], *batch, k), p["dtype"], p["styles"][0], device)
    w = strided((g, *own, k, m), p["dtype"], p["styles"][1], device)
    bias = strided((g, *own, m), p["dtype"], p["styles"][2], device) if p["bias"] else None
    groups = group_tensor(p, device)
    keyword = {"offsets": groups} if p["offsets"] else {"group_sizes": groups}
    y = multigemm.grouped_mm(
        x, w, **keyword, bias=bias, out_dtype=p["out_dtype"], implementation=implementation or None
    )
    assert y.dtype == (p["out_dtype"] or p["dtype"])
    expected = oracle.grouped_mm(x, w, groups.tolist(), p["offsets"], bias)
    oracle.assert_close(y, expected, narrowest(p["dtype"], p["out_dtype"]), k, 16.0)


@SETTINGS
@given(p=problems())
def test_grouped_mm_wgrad(p: dict, implementation: str, device: torch.device) -> None:
    torch.manual_seed(p["seed"])
    b, k, m = p["batch"], p["k"], p["m"]
    batch = () if b is None else (b,)
    sum_batch = b is not None and p["shared"]
    x = strided((p["rows"], *batch, k), p["dtype"], p["styles"][0], device)
    gy = strided((p["rows"], *batch, m), p["dtype"], p["styles"][1], device)
    groups = group_tensor(p, device)
    keyword = {"offsets": groups} if p["offsets"] else {"group_sizes": groups}
    dw = multigemm.grouped_mm_wgrad(
        x, gy, **keyword, sum_batch=sum_batch, out_dtype=p["out_dtype"], implementation=implementation or None
    )
    assert dw.dtype == (p["out_dtype"] or p["dtype"])
    expected = oracle.grouped_mm_wgrad(x, gy, groups.tolist(), p["offsets"], sum_batch)
    terms = p["rows"] * (b or 1 if sum_batch else 1)
    oracle.assert_close(dw, expected, narrowest(p["dtype"], p["out_dtype"]), terms, 16.0)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "k", "m"),
    [([300, 0, 1, 213], 257, 129), ([40] * 7, 512, 320), ([1] * 64, 96, 200), ([2, 4, 0, 3, 1], 131, 301)],
)
def test_larger_products(
    sizes: list[int], k: int, m: int, dtype: torch.dtype, implementation: str, device: torch.device
) -> None:
    """Sizes at which tiles, panels and threads come into play."""
    torch.manual_seed(0)
    x = torch.randn(sum(sizes) + 3, k, device=device).to(dtype)
    w = torch.randn(len(sizes), k, m, device=device).to(dtype)
    gy = torch.randn(sum(sizes) + 3, m, device=device).to(dtype)
    s = torch.tensor(sizes, device=device)
    name = implementation or None
    y = multigemm.grouped_mm(x, w, s, implementation=name)
    oracle.assert_close(y, oracle.grouped_mm(x, w, sizes), dtype, k, 16.0)
    gx = multigemm.grouped_mm(gy, w.mT, s, implementation=name)
    oracle.assert_close(gx, oracle.grouped_mm(gy, w.mT, sizes), dtype, m, 16.0)
    dw = multigemm.grouped_mm_wgrad(x, gy, s, implementation=name)
    oracle.assert_close(dw, oracle.grouped_mm_wgrad(x, gy, sizes), dtype, max(sizes), 16.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(60, 4, 33, 16, 48), (50, 9, 128, 4, 4), (30, 3, 1, 128, 128)])
def test_equivariant_shapes(
    shape: tuple[int, ...], dtype: torch.dtype, implementation: str, device: torch.device
) -> None:
    n, g, b, k, m = shape
    torch.manual_seed(0)
    order = multigemm.sort_by_group(torch.randint(0, g, (n,), device=device), g)
    sizes = order.group_sizes.tolist()
    x = torch.randn(n, b, k, device=device, dtype=dtype)
    w = torch.randn(g, b, k, m, device=device, dtype=dtype)
    gy = torch.randn(n, b, m, device=device, dtype=dtype)
    name = implementation or None
    y = multigemm.grouped_mm(x, w, order.group_sizes, implementation=name)
    oracle.assert_close(y, oracle.grouped_mm(x, w, sizes), dtype, k, 16.0)
    gx = multigemm.grouped_mm(gy, w.mT, order.group_sizes, implementation=name)
    oracle.assert_close(gx, oracle.grouped_mm(gy, w.mT, sizes), dtype, m, 16.0)
    dw = multigemm.grouped_mm_wgrad(x, gy, order.group_sizes, implementation=name)
    oracle.assert_close(dw, oracle.grouped_mm_wgrad(x, gy, sizes), dtype, n, 16.0)


@pytest.mark.parametrize("shape", [(0, 0, 0, 0), (3, 0, 4, 5), (0, 2, 4, 5), (3, 2, 0, 5), (3, 2, 4, 0)])
@pytest.mark.parametrize("batch", [(), (0,), (2,)])
def test_sizes_of_zero(
    shape: tuple[int, ...], batch: tuple[int, ...], pinned: str, device: torch.device
) -> None:
    n, g, k, m = shape
    sizes = torch.tensor(([2] + [0] * g)[:g], dtype=torch.int64, device=device)
    y = multigemm.grouped_mm(
        torch.ones(n, *batch, k, device=device), torch.ones(g, *batch, k, m, device=device), sizes
    )
    assert y.shape == (n, *batch, m)
    assert torch.equal(y[:2].cpu(), torch.full((min(n, 2), *batch, m), float(k if g else 0)))
    dw = multigemm.grouped_mm_wgrad(torch.ones(n, *batch, k, device=device), y, sizes)
    assert dw.shape == (g, *batch, k, m)
    assert torch.equal(dw[1:].cpu(), torch.zeros(max(g - 1, 0), *batch, k, m))
