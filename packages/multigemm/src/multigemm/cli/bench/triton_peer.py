"""A persistent grouped product in Triton, as a peer: what one would write for a GPU without a library.

One program for each multiprocessor walks the tiles of all groups; the ends of the groups are read on the
device. Operands come through tensor descriptors, so widths are multiples of 8. A few tile shapes are tried
at warm-up and the fastest stays. Imported only where Triton is.

    rows:   y[n] = x[n] @ w[g(n)]                      x [N,K], w [G,K,M] (or its transpose) -> y [N,M]
    wgrad:  dw[g] = sum over n in g of x[n]^T gy[n]    x [N,K], gy [N,M] -> dw [G,K,M]
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import timing

# Rows, columns and length of a step of a tile, warps, stages.
ROWS_TILES = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (64, 256, 64, 4, 4),
    (64, 128, 128, 4, 4),
    (16, 128, 128, 4, 5),
)
WGRAD_TILES = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 4, 5),
    (64, 128, 64, 4, 4),
)
BAND = 8  # tiles of rows that share the columns of w while these are in the cache


@triton.jit
def _rows_kernel(
    x,
    w,
    y,
    ends,
    groups,
    inner,
    outer,
    y_stride,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.cdiv(outer, COLUMNS)
    before = 0
    start = 0
    for g in range(groups):
        end = tl.load(ends + g)
        bands = tl.cdiv(end - start, ROWS)
        tiles = bands * columns
        while tile < before + tiles:
            place = tile - before
            first = place // (BAND * columns) * BAND
            height = tl.minimum(bands - first, BAND)
            place = place - first * columns
            n = start + (first + place % height) * ROWS
            m = place // height * COLUMNS
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k in range(0, inner, STEP):
                a = x.load([n, k])
                if TRANSPOSED:  # noqa: SIM108  # decided when the kernel is compiled
                    b = w.load([g * outer + m, k]).T
                else:
                    b = w.load([g * inner + k, m])
                total = tl.dot(a, b, total)
            row = n + tl.arange(0, ROWS)
            column = m + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < outer)[None, :]
            place_of = row.to(tl.int64)[:, None] * y_stride + column[None, :]
            tl.store(y + place_of, total.to(y.dtype.element_ty), mask=inside)
            tile += programs
        before += tiles
        start = end


@triton.jit
def _wgrad_kernel(
    x,
    gy,
    dw,
    ends,
    groups,
    inner,
    outer,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    columns = tl.cdiv(outer, COLUMNS)
    tiles = tl.cdiv(inner, ROWS) * columns
    for tile in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        g = tile // tiles
        place = tile % tiles
        k = place // columns * ROWS
        m = place % columns * COLUMNS
        start = tl.load(ends + g - 1, mask=g > 0, other=0)
        end = tl.load(ends + g)
        whole = start + (end - start) // STEP * STEP
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for n in range(start, whole, STEP):
            total = tl.dot(x.load([n, k]).T, gy.load([n, m]), total)
        if whole < end:
            row = whole + tl.arange(0, STEP)
            a = tl.where((row < end)[:, None], x.load([whole, k]), 0.0)
            b = tl.where((row < end)[:, None], gy.load([whole, m]), 0.0)
            total = tl.dot(a.T, b, total)
        row = k + tl.arange(0, ROWS)
        column = m + tl.arange(0, COLUMNS)
        inside = (row < inner)[:, None] & (column < outer)[None, :]
        place_of = (g.to(tl.int64) * inner + row.to(tl.int64)[:, None]) * outer + column[None, :]
        tl.store(dw + place_of, total.to(dw.dtype.element_ty), mask=inside)


def refusal(x: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why this peer does not take the operands."""
    if x.dim() != 2:
        return "the Triton peer takes no batch dimension B"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "the Triton peer takes bfloat16 and float16 only"
    if x.shape[-1] % 8 or other.shape[-1] % 8:
        return "the Triton peer wants widths that are multiples of 8"
    return None


Run = Callable[[], torch.Tensor]


def rows(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> Run:
    """x [N,K] @ w [G,K,M], contiguous or the transpose of what is; the rows past the last end stay unset."""
    transposed = not w.is_contiguous()
    stored = w.mT if transposed else w
    groups, inner, outer = w.shape
    flat = stored.reshape(groups * stored.shape[1], stored.shape[2])
    programs = _multiprocessors(x.device)

    def way(tile: tuple[int, ...]) -> Run:
        height, width, step, warps, stages = tile
        a = TensorDescriptor.from_tensor(x, [height, step])
        b = TensorDescriptor.from_tensor(flat, [width, step] if transposed else [step, width])

        def run() -> torch.Tensor:
            y = x.new_empty(x.shape[0], outer)
            _rows_kernel[(programs,)](
                a, b, y, ends, groups, inner, outer, y.stride(0), transposed, height, width, step, BAND,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return y

        return run

    return _fastest(x.device, ROWS_TILES, way)


def wgrad(x: torch.Tensor, gy: torch.Tensor, ends: torch.Tensor) -> Run:
    """dw [G,K,M] of x [N,K] and gy [N,M]."""
    groups, inner, outer = ends.shape[0], x.shape[1], gy.shape[1]
    programs = _multiprocessors(x.device)

    def way(tile: tuple[int, ...]) -> Run:
        height, width, step, warps, stages = tile
        a = TensorDescriptor.from_tensor(x, [step, height])
        b = TensorDescriptor.from_tensor(gy, [step, width])

        def run() -> torch.Tensor:
            dw = x.new_empty(groups, inner, outer)
            _wgrad_kernel[(programs,)](
                a, b, dw, ends, groups, inner, outer, height, width, step,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return dw

        return run

    return _fastest(x.device, WGRAD_TILES, way)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _fastest(device: torch.device, tiles: tuple[Any, ...], way: Callable[[Any], Run]) -> Run:
    """The fastest of the tile shapes that this GPU has room for."""
    ways: dict[str, Run] = {}
    reasons = []
    for tile in tiles:
        try:
            run = way(tile)
            run()
        except Exception as error:  # a compiler's or a launch's, of many classes
            reasons.append(f"{tile}: {str(error).strip().partition(chr(10))[0]}")
        else:
            ways["x".join(map(str, tile))] = run
    if not ways:
        raise RuntimeError("; ".join(reasons))
    return ways[timing.fastest(device, ways)]
