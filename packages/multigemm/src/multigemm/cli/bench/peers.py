"""Ours and the peers as calls without arguments, over the same operands.

Every call makes its own outputs, once per call, as a user's would. Ours and torch's get the group sizes
as a tensor, the loop has them as a list already: its best case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch

import multigemm

from .cases import SEED, Case

Outputs = tuple[torch.Tensor, ...]
Call = Callable[[], Outputs]


@dataclass
class Problem:
    """Operands of one case. x [N,(B,)K], w [G,(B,)K,M], gy [N,(B,)M], normal data."""

    case: Case
    sizes: list[int]
    x: torch.Tensor
    w: torch.Tensor
    gy: torch.Tensor
    group_sizes: torch.Tensor
    offsets: torch.Tensor

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(g, start, end) of each group that has rows."""
        start = 0
        for g, size in enumerate(self.sizes):
            if size:
                yield g, start, start + size
            start += size


def make(case: Case, sizes: list[int], dtype: torch.dtype, device: torch.device) -> Problem:
    group_sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
    offsets = group_sizes.cumsum(0).to(torch.int32)
    return Problem(case, sizes, *_operands(case, dtype, device), group_sizes, offsets)


@lru_cache(maxsize=2)  # this case, and the one of a single element that tells the host time
def _operands(
    case: Case, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and gy, kept for the next row of the table: drawing them takes longer than multiplying them."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        wide = dtype if dtype.itemsize > 2 or device.type != "cpu" else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide, device=device).to(dtype)

    batch = () if case.B is None else (case.B,)
    x, gy = normal(case.N, *batch, case.K), normal(case.N, *batch, case.M)
    return x, normal(case.G, *batch, case.K, case.M), gy


def ours(p: Problem, op: str) -> Call:
    """The library, as it is called by default."""
    if op == "forward":
        return _inference(lambda: (multigemm.grouped_mm(p.x, p.w, p.group_sizes),))
    if op == "wgrad":
        return _inference(lambda: (multigemm.grouped_mm_wgrad(p.x, p.gy, p.group_sizes),))
    return _gradient(lambda x, w: multigemm.grouped_mm(x, w, p.group_sizes), p)


def torch_grouped_mm(p: Problem, op: str) -> Call | str:
    """torch's own grouped_mm, or the reason why it refuses the case."""
    function = getattr(torch.nn.functional, "grouped_mm", None)
    if function is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if p.x.dim() == 3:
        return "torch's grouped_mm takes no batch dimension B"
    if op == "forward":
        call = _inference(lambda: (function(p.x, p.w, offs=p.offsets),))
    elif op == "wgrad":
        call = _inference(lambda: (function(p.x.mT, p.gy, offs=p.offsets),))
    try:
        if op == "backward":
            call = _gradient(lambda x, w: function(x, w, offs=p.offsets), p)
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"torch's grouped_mm refuses: {str(error).strip().splitlines()[0]}"
    return call


def triton_is_there(device: torch.device) -> bool:
    """Whether there is a Triton that compiles for the device: then its kernel is a peer."""
    return device.type == "cuda" and find_spec("triton") is not None


def triton_grouped_mm(p: Problem, op: str) -> Call | str:
    """A persistent kernel in Triton, its tiles tuned to the case, or the reason why it refuses."""
    try:
        from . import triton_peer as peer

        refused = peer.refusal(p.x, p.gy)
        if refused is not None:
            return refused
        wgrad = None if op == "forward" else peer.wgrad(p.x, p.gy, p.offsets)
        if op == "wgrad" and wgrad is not None:
            return _inference(lambda: (wgrad(),))
        product = peer.rows(p.x, p.w, p.offsets) if op == "forward" else peer.rows(p.gy, p.w.mT, p.offsets)
    except (ImportError, RuntimeError) as error:
        return f"Triton's kernel fails: {str(error).strip().splitlines()[0]}"
    return _inference(lambda: (product(),) if wgrad is None else (product(), wgrad()))


def loops(p: Problem, op: str) -> dict[str, Call]:
    """A loop of one product per group that has rows, in the ways worth trying; the fastest is the peer."""
    if p.x.dim() == 3 and p.x.shape[1] > 1:
        return {
            "bmm into the output": _inference(lambda: _loop(p, op, _bmm_out)),
            "bmm and a copy": _inference(lambda: _loop(p, op, _bmm_copy)),
        }
    return {"mm into the output": _inference(lambda: _loop(p, op, _mm_out))}


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _loop(p: Problem, op: str, product: Product) -> Outputs:
    """Rows and matrices as 3-D views [B, n, ...]; B is 1 where the case has none."""
    x, w, gy = p.x, p.w, p.gy
    if op == "forward":
        y = torch.empty_like(gy)
        for g, start, end in p.spans():
            product(_rows(x, start, end), _matrix(w, g), _rows(y, start, end))
        return (y,)
    dw = torch.empty_like(w)
    for g, size in enumerate(p.sizes):
        if size == 0:
            dw[g].zero_()
    dx = torch.empty_like(x) if op == "backward" else None
    if dx is not None:
        dx[sum(p.sizes) :].zero_()
    for g, start, end in p.spans():
        if dx is not None:
            product(_rows(gy, start, end), _matrix(w, g).mT, _rows(dx, start, end))
        product(_rows(x, start, end).mT, _rows(gy, start, end), _matrix(dw, g))
    return (dw,) if dx is None else (dx, dw)


def _rows(t: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """[N,(B,)C] -> [B|1, n, C], a view."""
    block = t[start:end]
    return block.unsqueeze(0) if t.dim() == 2 else block.transpose(0, 1)


def _matrix(w: torch.Tensor, g: int) -> torch.Tensor:
    """[G,(B,)K,M] -> [B|1, K, M], a view."""
    return w[g].unsqueeze(0) if w.dim() == 3 else w[g]


def _mm_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a[0], b[0], out=out[0])


def _bmm_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(a, b, out=out)


def _bmm_copy(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.bmm(a, b))


def _inference(call: Call) -> Call:
    def run() -> Outputs:
        with torch.inference_mode():
            return call()

    return run


def _gradient(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], p: Problem) -> Call:
    """The backward pass alone: (dx, dw) of a product whose forward pass is done."""
    x, w = p.x.detach().requires_grad_(), p.w.detach().requires_grad_()
    y = function(x, w)
    return lambda: torch.autograd.grad(y, (x, w), p.gy, retain_graph=True)


def check(p: Problem, op: str, outputs: Outputs, *, zero_tail: bool) -> float:
    """The largest difference from a float64 reference over the largest value of that reference.

    Computed group by group, so that no second output is held. With ``zero_tail`` the rows that have no
    group have to be zeros (an infinite error where they are not). NaN counts as an infinite error.
    """
    errors = []
    named = {"forward": ("y",), "wgrad": ("dw",), "backward": ("dx", "dw")}[op]
    for name, out in zip(named, outputs, strict=True):
        worst = torch.zeros((), dtype=torch.float64, device=out.device)
        largest = torch.zeros_like(worst)
        pairs = _against_reference(p, name, out)
        for got, expected in pairs:
            worst = torch.maximum(worst, (got.double() - expected).abs().max())
            largest = torch.maximum(largest, expected.abs().max())
        tail = out[sum(p.sizes) :] if name != "dw" else out[:0]
        if zero_tail and bool((tail != 0).any()):
            return float("inf")
        value = float(worst / largest) if float(largest) else float(worst)
        errors.append(value if value == value else float("inf"))
    return max(errors)


def _against_reference(
    p: Problem, name: str, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(computed, expected in float64) of each group; [B|1, ...] each. Empty groups of dw are zeros."""
    if name == "dw":
        empty = [g for g, size in enumerate(p.sizes) if size == 0]
        for g in empty:
            yield out[g], torch.zeros((), dtype=torch.float64, device=out.device)
    for g, start, end in p.spans():
        if name == "y":
            yield _rows(out, start, end), _rows(p.x, start, end).double() @ _matrix(p.w, g).double()
        elif name == "dx":
            yield _rows(out, start, end), _rows(p.gy, start, end).double() @ _matrix(p.w, g).double().mT
        else:
            expected = _rows(p.x, start, end).double().mT @ _rows(p.gy, start, end).double()
            yield _matrix(out, g), expected
