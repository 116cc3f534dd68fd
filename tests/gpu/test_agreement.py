"""Every implementation computes the same, over dtypes, layouts, batches, options and groups."""

from __future__ import annotations

from collections.abc import Callable

import oracle
import pytest
import torch
from gpu import kit

import multigemm
from multigemm import _dispatch


def explained(
    p: kit.Operands, op: str, call: Callable[..., torch.Tensor], name: str | None, where: str
) -> torch.Tensor:
    """The result, after a look at what `explain` says of it."""
    result = call(name, where)
    told = p.explain(op, name, where)
    backend = _dispatch.backend_for("cuda")
    assert backend is not None, "the suite is about a native backend"
    assert told.implementation == backend.name and told.device == str(p.x.device) and told.kernel
    if name in ("blas", "torch"):
        assert told.kernel == name
    return result


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("case", kit.CASES, ids=lambda case: case.name)
def test_all_implementations(case: kit.Case, dtype: torch.dtype, poison: Callable[[], None]) -> None:
    p = kit.make(case, dtype)
    for where in ("device", "host"):
        for name in kit.usable(kit.NAMES):
            poison()
            y = explained(p, "grouped_mm", p.forward, name, where)
            dw = explained(p, "grouped_mm_wgrad", p.wgrad, name, where)
            assert y.dtype == dw.dtype == (case.out_dtype or dtype), (name, where)
            p.check_forward(y)
            p.check_wgrad(dw)


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_into_outputs_of_any_layout(name: str | None, dtype: torch.dtype) -> None:
    p = kit.make(kit.CASES[1], dtype)
    rows, groups = p.x.shape[0], len(p.case.sizes)
    for layout in ("contiguous", "transposed", "unaligned", "stepped", "cut oddly"):
        y = kit.laid_out((rows, p.case.m), layout, dtype, p.x.device).fill_(float("nan"))
        dw = kit.laid_out((groups, p.case.k, p.case.m), layout, dtype, p.x.device).fill_(float("nan"))
        multigemm.grouped_mm(p.x, p.w, p.groups, bias=p.bias, out=y, implementation=name)
        multigemm.grouped_mm_wgrad(p.x, p.gy, p.groups, out=dw, implementation=name)
        p.check_forward(y)
        p.check_wgrad(dw)


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
def test_sizes_are_clamped(dtype: torch.dtype) -> None:
    """Negative ones, falling offsets and groups past the rows, by each kernel that reads them there."""
    x, w = torch.randn(50, 64, device="cuda").to(dtype), torch.randn(4, 64, 48, device="cuda").to(dtype)
    guard = torch.full((60, 48), 7.0, dtype=dtype, device="cuda")
    for values in ([-5, 30, -1, 9], [40, 40, 40, 40], [2**62, 2**62, 1, 1], [-(2**63), 3, 2**63 - 1, 5]):
        for offsets in (False, True):
            groups = torch.tensor(values, device="cuda")
            keyword = {"offsets" if offsets else "group_sizes": groups}
            for name in (None, "native", "simt"):
                guard.fill_(7.0)
                multigemm.grouped_mm(x, w, **keyword, out=guard[5:55], implementation=name)
                oracle.assert_close(guard[5:55], oracle.grouped_mm(x, w, values, offsets), dtype, 64, 16.0)
                assert bool((guard[:5] == 7).all()) and bool((guard[55:] == 7).all())
                dw = multigemm.grouped_mm_wgrad(x, x, **keyword, implementation=name)
                oracle.assert_close(dw, oracle.grouped_mm_wgrad(x, x, values, offsets), dtype, 50, 16.0)


@pytest.mark.parametrize("name", [None, "native", "blas", "torch"])
def test_tf32_only_where_it_is_asked_for(name: str | None) -> None:
    """Full float32 by default; by argument or by torch's flag 10 bits of a factor, and never worse."""
    torch.manual_seed(0)
    x, w = torch.randn(300, 512, device="cuda"), torch.randn(3, 512, 256, device="cuda")
    sizes = torch.tensor([100, 50, 150], device="cuda")
    exact = multigemm.grouped_mm(x.double(), w.double(), sizes)

    def error(precision: str | None) -> float:
        y = multigemm.grouped_mm(x, w, sizes, precision=precision, implementation=name)
        return float((y.double() - exact).abs().max())

    full, loose = 16 * (4 * 513**0.5 + 128) * 2.0**-24, 16 * 4 * 513**0.5 * 2.0**-11
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for flag in ("ieee", "tf32"):
            matmul.fp32_precision = flag
            print(f"flag {flag}: error {error('ieee'):.1e} in ieee, {error('tf32'):.1e} in tf32")
            assert error("ieee") <= full
            assert error("tf32") <= loose
            for x_, w_ in ((x, w), (x[:7], w)):
                by_flag = multigemm.grouped_mm(x_, w_, sizes, implementation=name)
                asked = multigemm.grouped_mm(x_, w_, sizes, precision=flag, implementation=name)
                assert torch.equal(by_flag, asked)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", kit.NAMES)
def test_the_same_bits_again(name: str | None, dtype: torch.dtype, poison: Callable[[], None]) -> None:
    for case in (c for c in kit.CASES if c.name in ("rows of no group", "tall", "odd widths", "equivariant")):
        p = kit.make(case, dtype)
        first = p.forward(name), p.wgrad(name)
        for _ in range(5):
            poison()  # other memory, of other content
            held = torch.empty(1 << 20, device="cuda")
            again = p.forward(name), p.wgrad(name)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
            del held


@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
@pytest.mark.parametrize("name", [None, "native", "simt"])
def test_gradients_of_a_sum(name: str | None, dtype: torch.dtype) -> None:
    """`y.sum().backward()` brings a gradient whose strides are all zero."""
    p = kit.make(kit.CASES[1], dtype)
    x, w, bias = (t.detach().requires_grad_() for t in (p.x, p.w, p.bias))
    multigemm.grouped_mm(x, w, p.groups, bias=bias, implementation=name).sum().backward()
    ones = torch.ones_like(p.gy)
    sizes = list(p.case.sizes)
    oracle.assert_close(x.grad, oracle.grouped_mm(ones, p.w.mT, sizes), dtype, p.case.m, 16.0)
    oracle.assert_close(w.grad, oracle.grouped_mm_wgrad(p.x, ones, sizes), dtype, max(sizes), 16.0)
    one = torch.ones_like(p.x[:, :1])
    expected = oracle.grouped_mm_wgrad(one, ones, sizes)[:, 0]
    oracle.assert_close(bias.grad, expected, dtype, max(sizes), 16.0)


def test_explain_is_text_and_data() -> None:
    p = kit.make(kit.CASES[0], torch.bfloat16)
    for op in ("grouped_mm", "grouped_mm_wgrad"):
        for name in kit.usable(kit.NAMES):
            told = p.explain(op, name)
            print(told)
            assert told.operator == op and told.named == (name or "")
            assert set(told.as_dict()) >= {"kernel", "implementation", "reasons", "notes"}
            assert told.kernel not in told.reasons and all(told.reasons.values())
