"""The operators in readable torch: the specification, and the implementation where no backend applies.

    y[n]  = x[n] @ w[g(n)] + bias[g(n)]           n < R, zero in the rows past R
    dw[g] = sum over the rows n of g of x[n]^T gy[n]

Every product is one call of torch's matrix product on views, written straight into its place in the
output: no temporary passes the size of one group's output. On a device other than the CPU the group
sizes are read back, which synchronises; native backends do not need that.
"""

from __future__ import annotations

import torch

from . import _groups, _precision

_HALVES = (torch.float16, torch.bfloat16)


def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    precision: str,
) -> None:
    """x [N,(B,)K], w [G,(B|1,)K,M], bias [G,(B|1,)M] -> out [N,(B,)M], all of it written."""
    product = _product if x.dim() == 2 else _batched_product
    spans, rows = _groups.spans(groups, offsets, x.shape[0])
    with _precision.held(x, precision):
        for g, (start, end) in enumerate(spans):
            if end > start:
                product(x[start:end], w[g], None if bias is None else bias[g], out[start:end])
    if rows < x.shape[0]:
        out[rows:].zero_()


def grouped_mm_wgrad(
    x: torch.Tensor,
    gy: torch.Tensor,
    groups: torch.Tensor,
    offsets: bool,
    sum_batch: bool,
    out: torch.Tensor,
    precision: str,
) -> None:
    """x [N,(B,)K], gy [N,(B,)M] -> out [G,(B|1,)K,M], all of it written; B is summed where sum_batch."""
    spans, _ = _groups.spans(groups, offsets, x.shape[0])
    with _precision.held(x, precision):
        for g, (start, end) in enumerate(spans):
            if end == start:
                out[g].zero_()
                continue
            xs, gys = x[start:end], gy[start:end]
            if x.dim() == 2:
                _product(xs.mT, gys, None, out[g])
            elif sum_batch:
                _product(_fold(xs).mT, _fold(gys), None, out[g, 0])
            else:
                _bmm(xs.permute(1, 2, 0), gys.transpose(0, 1), None, out[g])


def _fold(t: torch.Tensor) -> torch.Tensor:
    """[n, B, K] -> [n B, K]; named sizes, because -1 is ambiguous in an empty tensor."""
    return t.reshape(t.shape[0] * t.shape[1], t.shape[2])


def _batched_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """x [n,B,K], w [B|1,K,M], bias [B|1,M] -> out [n,B,M]."""
    if w.shape[0] == 1 and (bias is None or bias.shape[0] == 1) and out.is_contiguous():
        # One matrix for all of B: the features are just more rows.
        _product(_fold(x), w[0], None if bias is None else bias[0], _fold(out))
        return
    w = w.expand(x.shape[1], *w.shape[1:])
    _bmm(x.transpose(0, 1), w, None if bias is None else bias.unsqueeze(1), out.transpose(0, 1))


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = a @ b + bias, accumulated in fp32 or fp64 and rounded once."""
    acc = _accumulator(a.dtype)
    if bias is None and a.dtype == out.dtype and (acc == a.dtype or _multiplies(a)):
        torch.mm(a, b, out=out)
    elif bias is None and acc == out.dtype:
        torch.mm(a.to(acc), b.to(acc), out=out)
    elif bias is None:
        out.copy_(torch.mm(a.to(acc), b.to(acc)))
    else:
        out.copy_(torch.mm(a.to(acc), b.to(acc)).add_(bias))


def _bmm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As ``_product`` for each of B. Few rows go faster through a temporary and a copy than into strides."""
    acc = _accumulator(a.dtype)
    if bias is None and a.dtype == out.dtype == acc and (out.is_contiguous() or a.shape[1] >= 16):
        torch.bmm(a, b, out=out)
        return
    y = torch.bmm(a.to(acc), b.to(acc))
    out.copy_(y if bias is None else y.add_(bias))


def _multiplies(t: torch.Tensor) -> bool:
    """Whether torch multiplies this half precision well as it is: GPUs do, CPUs with the instructions do.

    Elsewhere a conversion to float32 and its product take a tenth of the time.
    """
    if t.device.type != "cpu":
        return True
    name = "bf16" if t.dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype
