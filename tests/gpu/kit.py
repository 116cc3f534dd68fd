"""Problems that every kernel and implementation has to agree on, and the operands of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import oracle
import torch

import multigemm
from multigemm import _dispatch
from multigemm._backend import Backend

NAMES = (None, "native", "blas", "torch", "simt")
DTYPES = oracle.DTYPES
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """x [N,(B,)K], w [G,(B|1,)K,M], gy [N,(B,)M]; ``rest`` rows belong to no group; layouts as `laid_out`."""

    name: str
    sizes: tuple[int, ...]
    k: int
    m: int
    b: int | None = None
    rest: int = 0
    shared: bool = False
    bias: bool = False
    out_dtype: torch.dtype | None = None
    x: str = "contiguous"
    w: str = "contiguous"
    gy: str = "contiguous"
    offsets: bool = False
    index: torch.dtype = torch.int64


USUAL = (130, 0, 257, 64)
CASES = [
    Case("aligned", USUAL, 128, 256),
    Case("rows of no group", USUAL, 128, 256, rest=77, bias=True),
    Case("transposed w", USUAL, 192, 128, w="transposed", offsets=True, index=torch.int32),
    Case("odd widths", USUAL, 129, 67, rest=3),
    Case("odd widths, transposed w", USUAL, 67, 131, w="transposed", bias=True),
    Case("odd address", USUAL, 128, 128, x="unaligned", w="unaligned", gy="unaligned"),
    Case("every second column", USUAL, 96, 64, x="stepped", gy="stepped"),
    Case("rows cut from wider ones", USUAL, 128, 72, x="cut", gy="cut", w="cut"),
    Case("rows cut at odd places", USUAL, 128, 72, x="cut oddly", gy="cut oddly", w="cut oddly"),
    Case("transposed x and gy", USUAL, 72, 80, x="transposed", gy="transposed"),
    Case("expanded", USUAL, 64, 96, x="expanded", gy="scalar", w="expanded"),
    Case("one group", (301,), 320, 200, index=torch.int32),
    Case("one row each", (1,) * 70, 256, 192, bias=True),
    Case("few rows", (2, 0, 5, 1, 16, 3), 512, 384),
    Case("no rows", (0, 0, 0), 64, 64, rest=5, bias=True),
    Case("tall", (1000, 3, 0, 517), 264, 392, rest=9),
    Case("wide", (40, 70), 1032, 1544),
    Case("hundreds of groups", tuple(n % 4 for n in range(300)), 48, 80, rest=2),
    Case("thousands of groups", tuple(n % 3 for n in range(1500)), 16, 24, offsets=True),
    Case("tiny", (3, 0, 2), 1, 1, rest=1, bias=True),
    Case("narrow", (90, 31), 3, 5, bias=True),
    Case("to float32", USUAL, 128, 96, out_dtype=torch.float32, bias=True),
    Case("to bfloat16", USUAL, 128, 96, out_dtype=torch.bfloat16),
    Case("batch", (33, 0, 20, 7), 64, 48, b=3, rest=4, bias=True),
    Case("batch, shared w", (33, 0, 20, 7), 64, 48, b=3, rest=4, shared=True, bias=True),
    Case("batch, transposed w", (33, 0, 20, 7), 40, 72, b=3, w="transposed"),
    Case("batch, odd widths", (33, 0, 20, 7), 17, 9, b=5, x="cut oddly", gy="cut oddly"),
    Case("batch, shared w, cut x", (33, 0, 20, 7), 16, 16, b=4, shared=True, x="cut", gy="cut"),
    Case("equivariant", (50, 0, 9, 81), 16, 96, b=33, rest=3),
    Case("equivariant, tiny matrices", (150, 61), 4, 4, b=40),
    Case("one channel", (150, 0, 61), 128, 128, b=1),
]


def lacks_blas(backend: Backend | None) -> bool:
    """Whether a CUDA backend has met what stands in for the cuBLAS of its major, and tells no version."""
    return backend is not None and backend.kind == "cuda" and not backend.query["blas_version"]


def usable(names: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Those implementations that can be pinned in this process."""
    left_out = {"blas"} if lacks_blas(_dispatch.backend_for("cuda")) else set()
    return tuple(name for name in names if name not in left_out)


SMALL = [case for case in CASES if sum(case.sizes) * (case.b or 1) * case.k * case.m < 2**24]


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values of ``shape`` in memory of that layout; what lies between and around them is NaN."""

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    def inside(sizes: tuple[int, ...], *place: slice) -> torch.Tensor:
        wide = torch.full(sizes, float("nan"), dtype=dtype, device=device)
        view = wide[(..., *place)]
        view.copy_(normal(*shape))
        return view

    if layout == "contiguous":
        return normal(*shape)
    if layout == "transposed":
        return normal(*shape[:-2], shape[-1], shape[-2]).mT
    if layout == "unaligned":
        flat = torch.full((1 + torch.Size(shape).numel(),), float("nan"), dtype=dtype, device=device)
        flat[1:] = normal(*shape).flatten()
        return flat[1:].view(shape)
    if layout == "stepped":
        return inside((*shape[:-1], 2 * shape[-1]), slice(0, None, 2))
    if layout == "cut":
        return inside((*shape[:-1], shape[-1] + 16), slice(8, 8 + shape[-1]))
    if layout == "cut oddly":
        return inside((*shape[:-1], shape[-1] + 3), slice(1, 1 + shape[-1]))
    if layout in ("expanded", "scalar"):
        # Eighths: equal terms would all be rounded the same way, and the error of their sum grow with them.
        one = normal(*([1, *shape[1:]] if layout == "expanded" else []))
        return one.mul(8).round().div(8).expand(shape)
    raise ValueError(layout)


@dataclass
class Operands:
    case: Case
    dtype: torch.dtype
    x: torch.Tensor
    w: torch.Tensor
    gy: torch.Tensor
    bias: torch.Tensor | None
    groups: torch.Tensor

    def keyword(self, where: str = "device") -> dict[str, torch.Tensor]:
        """The group sizes or offsets as an argument, on the operands' device or on the host."""
        value = self.groups.cpu() if where == "host" else self.groups
        return {"offsets" if self.case.offsets else "group_sizes": value}

    def forward(
        self, name: str | None = None, where: str = "device", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multigemm.grouped_mm(
            self.x,
            self.w,
            **self.keyword(where),
            bias=self.bias,
            out_dtype=self.case.out_dtype,
            out=out,
            implementation=name,
        )

    def wgrad(
        self, name: str | None = None, where: str = "device", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multigemm.grouped_mm_wgrad(
            self.x,
            self.gy,
            **self.keyword(where),
            sum_batch=self.case.shared,
            out_dtype=self.case.out_dtype,
            out=out,
            implementation=name,
        )

    def explain(
        self, op: str, name: str | None = None, where: str = "device"
    ) -> multigemm.explain.Explanation:
        other, more = (
            (self.w, {"bias": self.bias})
            if op == "grouped_mm"
            else (self.gy, {"sum_batch": self.case.shared})
        )
        return multigemm.explain(
            self.x,
            other,
            **self.keyword(where),
            op=op,
            out_dtype=self.case.out_dtype,
            implementation=name,
            **more,
        )

    def check_forward(self, y: torch.Tensor) -> None:
        expected = _expected(self.case, self.dtype)[0]
        oracle.assert_close(y, expected, self._narrowest(), self.case.k, 16.0)
        tail = y[sum(self.case.sizes) :]
        assert torch.equal(tail, torch.zeros_like(tail)), "rows of no group are not zero"

    def check_wgrad(self, dw: torch.Tensor) -> None:
        terms = max(self.case.sizes) * (self.case.b or 1 if self.case.shared else 1)
        oracle.assert_close(dw, _expected(self.case, self.dtype)[1], self._narrowest(), terms, 16.0)

    def _narrowest(self) -> torch.dtype:
        dtypes = [self.dtype, self.case.out_dtype or self.dtype]
        return max(dtypes, key=oracle.ROUNDOFF.__getitem__)


def make(case: Case, dtype: torch.dtype, device: torch.device | str = "cuda") -> Operands:
    """The same values at every call."""
    device = torch.device(device)
    torch.manual_seed(1)
    rows, groups = sum(case.sizes) + case.rest, len(case.sizes)
    batch = () if case.b is None else (case.b,)
    own = () if case.b is None else ((1,) if case.shared else (case.b,))
    x = laid_out((rows, *batch, case.k), case.x, dtype, device)
    w = laid_out((groups, *own, case.k, case.m), case.w, dtype, device)
    gy = laid_out((rows, *batch, case.m), case.gy, dtype, device)
    bias = laid_out((groups, *own, case.m), "contiguous", dtype, device) if case.bias else None
    value = torch.tensor(case.sizes, dtype=torch.int64)
    value = (value.cumsum(0) if case.offsets else value).to(case.index).to(device)
    return Operands(case, dtype, x, w, gy, bias, value)


@lru_cache(maxsize=4)
def _expected(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    p = make(case, dtype)
    sizes = list(case.sizes)
    y = oracle.grouped_mm(p.x, p.w, sizes, False, p.bias)
    return y, oracle.grouped_mm_wgrad(p.x, p.gy, sizes, False, case.shared)
