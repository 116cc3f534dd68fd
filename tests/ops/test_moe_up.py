"""The first product of a layer with its activation, of rows in expert order or of tokens by index."""

from __future__ import annotations

import pytest
import torch
from oracle import ROUNDOFF

pytest.importorskip("pydantic")

from moe_operands import KINDS, close, places_of, random

from multigemm.moe import _composed

pytestmark = pytest.mark.usefixtures("backend")
ops = torch.ops.multigemm


UP = [  # rows of each group, rows of none, K, I: few rows that share tiles along K, heights, odd widths
    ([0, 1, 0, 5], 2, 520, 136),
    ([7, 0, 33], 0, 1024, 64),
    ([300, 0, 129, 64, 1], 9, 72, 200),
    ([1000, 3], 0, 136, 24),
    ([40, 41], 3, 50, 7),
    ([0, 0], 5, 64, 8),
]


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "rest", "k", "width"), UP)
def test_up(
    rows: list[int], rest: int, k: int, width: int, kind: str, bias: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Product and activation in one, of weights along both of their dimensions."""
    how = KINDS[kind]
    total, columns, groups = sum(rows) + rest, width * (2 if how.gated else 1), len(rows)
    x = random(total, k, device=device, dtype=dtype)
    w = (random(groups, k, columns, device=device) / k**0.5).to(dtype)
    b = random(groups, columns, device=device, dtype=dtype) if bias else None
    ends = torch.tensor(rows).cumsum(0).to(device, torch.int32)
    expected = torch.zeros(total, width, dtype=torch.float64, device=device)
    start = 0
    for group, count in enumerate(rows):
        h = x[start : start + count].double() @ w[group].double()
        h = h if b is None else h + b[group].double()
        expected[start : start + count] = _composed.act(h, how).value
        start += count
    factor = 16 if dtype.itemsize == 2 else 128  # the sums of K terms add to the rounding of the result
    for matrices in (w, w.mT.contiguous().mT):
        out = x.new_empty(total, width)
        ops.native_moe_up(x, matrices, ends, b, None, None, out, 1, *how, "ieee", "")
        close(out, expected, dtype, factor)
        assert not out[start:].any()
        again = x.new_empty(total, width)
        ops.native_moe_up(x, matrices, ends, b, None, None, again, 1, *how, "ieee", "")
        assert torch.equal(out, again)


OF_TOKENS = [  # tokens, k, experts, H, I: few rows that share tiles along K, heights, odd widths, wide
    (0, 2, 3, 64, 8),
    (1, 1, 1, 64, 64),
    (3, 2, 5, 520, 136),
    (40, 1, 5, 1024, 64),
    (301, 3, 4, 72, 200),
    (900, 2, 2, 136, 24),
    (41, 2, 3, 50, 7),
    (300, 1, 2, 64, 8200),
]


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("kind", ["gated 0", "clamped, interleaved", "plain 1"])
@pytest.mark.parametrize(("tokens", "k", "experts", "h", "width"), OF_TOKENS)
def test_up_of_tokens(
    tokens: int, k: int, experts: int, h: int, width: int, kind: str, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Rows by index are those of a gather before, bit by bit, in any order of the slots of an expert."""
    how, columns = KINDS[kind], width * (2 if KINDS[kind].gated else 1)
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(-1, experts + 1, (tokens, k), generator=generator)
    order = torch.randperm(tokens * k, generator=generator)
    bins = torch.where(found < 0, experts, found).flatten()
    permutation = order[bins[order].argsort(stable=True)].to(device, torch.int32)
    inverse = permutation.argsort().int()
    ends = bins.bincount(minlength=experts + 1)[:experts].cumsum(0).to(device, torch.int32)
    wide = random(tokens, h + 8, device=device, dtype=dtype)
    w = (random(experts, h, columns, device=device) / h**0.5).to(dtype)
    b = random(experts, columns, device=device, dtype=dtype)
    for x in (wide[:, :h], wide[:, :h].contiguous()):
        rows = x[permutation.long() // k]
        for matrices, bias in ((w, b), (w.mT.contiguous().mT, None)):
            expected, out = x.new_empty(tokens * k, width), x.new_empty(tokens * k, width)
            options = (*how, "ieee", "")
            ops.native_moe_up(rows, matrices, ends, bias, None, None, expected, 1, *options)
            ops.native_moe_up(x, matrices, ends, bias, permutation, inverse, out, k, *options)
            assert torch.equal(out, expected)
            if tokens:
                assert not out[ends[-1] :].any()


def test_up_refuses_tokens_without_their_places(device: torch.device) -> None:
    places = places_of(4, 2, 3, device)
    x, w = random(4, 8, device=device), random(3, 8, 10, device=device)
    out, how = random(8, 5, device=device), (*KINDS["gated 0"], "ieee", "")
    for permutation, inverse in ((None, places.inverse), (places.permutation, places.inverse[:-1])):
        with pytest.raises(RuntimeError, match=r"permutation|inverse"):
            ops.native_moe_up(x, w, places.ends, None, permutation, inverse, out, 2, *how)
    columns = random(8, 4, device=device).mT
    with pytest.raises(RuntimeError, match="unit stride"):
        ops.native_moe_up(columns, w, places.ends, None, places.permutation, places.inverse, out, 2, *how)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_who_reads_tokens(dtype: torch.dtype, device: torch.device) -> None:
    """The kernel of Hopper does, of 16 bits, with a gate and few rows of each expert."""
    hopper = (
        device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)
    )
    eligible = hopper and dtype.itemsize == 2

    def answer(tokens: int, width: int, gated: bool, implementation: str = "") -> bool:
        x, ends = (
            random(tokens, 64, device=device, dtype=dtype),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
        w = x.new_empty(2, 64, width * (2 if gated else 1))
        found: bool = ops.native_moe_up_reads_tokens(
            x, w, ends, None, 2, gated, False, "ieee", implementation
        )
        return found

    assert answer(40, 64, True) == answer(40, 64, True, "native") == answer(1, 72, True) == eligible
    assert not answer(0, 64, True)
    assert not answer(40, 64, False)
    assert not answer(40, 64, True, "simt")
    assert not answer(200, 64, True)
