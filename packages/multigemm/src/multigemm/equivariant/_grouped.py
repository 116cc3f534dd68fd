"""The contraction by a grouped product: Horner's rule with all elements' innermost sums as one
``grouped_mm``.

    A[n, c, q] = sum over k of  V[element(n), c, k, q] * x[n, c, k]  + V[element(n), c, D, q]      q = (d, i,
    j)
    y[n, d, c] = sum over the pairs q of d of  A[n, c, q] * x[n, c, i] * x[n, c, j]

V holds the coefficients of the terms, zeros where there is no term. Everything is a public operator or plain
PyTorch, in any dtype, on any device; A and its like are temporaries of Q / D times the size of x.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops import GroupOrder, grouped_mm
from ..ops._library import forward_mode, signed
from ._irreps import Irreps
from ._rows import gather
from ._terms import Terms


def matrix_places(terms: Terms) -> torch.Tensor:
    """[(D+1) Q] int64: the term at each place of V, T where there is none."""
    pairs = terms.pairs.long()
    pair_of_term = torch.repeat_interleave(torch.arange(len(pairs)), pairs[:, 2] - pairs[:, 1])
    places = torch.full(((terms.width + 1) * len(pairs),), len(terms.last))
    places[terms.last.long() * len(pairs) + pair_of_term] = torch.arange(len(terms.last))
    return places


def pair_factors(terms: Terms) -> torch.Tensor:
    """[2, Q] int64: i and j of each pair."""
    heads, pairs = terms.heads.long(), terms.pairs.long()
    head_of_pair = torch.repeat_interleave(torch.arange(len(heads)), heads[:, 3] - heads[:, 2])
    return torch.stack([heads[head_of_pair, 1], pairs[:, 0]])


def pair_counts(terms: Terms) -> list[int]:
    """How many pairs each output component has; pairs stand in the order of the components."""
    return torch.bincount(terms.pairs[:, 3].long(), minlength=terms.components).tolist()


def matrices(coefficients: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
    """Coefficients [G, T, C] -> V [G, C, D+1, Q]."""
    wide = torch.nn.functional.pad(coefficients.transpose(1, 2), (0, 1))
    dense = wide.index_select(2, places)
    return dense.view(*dense.shape[:2], width + 1, dense.shape[2] // (width + 1))


def contract(
    x: torch.Tensor,
    order: GroupOrder,
    v: torch.Tensor,
    factors: torch.Tensor,
    counts: list[int],
) -> torch.Tensor:
    """x [N, C, D], V [G, C, D+1, Q] -> [N, C, O]."""
    rows = gather(x, order.permutation, order.inverse)
    width = x.shape[2]
    inner = grouped_mm(rows, v[:, :, :width], order.group_sizes, bias=v[:, :, width])
    extended = torch.nn.functional.pad(rows, (0, 1), value=1.0)
    products = inner * _pick(extended, factors[0]) * _pick(extended, factors[1])
    y = torch.stack([part.sum(-1) for part in products.split(counts, -1)], -1)
    return gather(y, order.inverse, order.permutation)


def _pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [N, C, D+1] -> [N, C, Q]; its gradient is a product with zeros and ones, summed in order."""
    if not torch.compiler.is_compiling() and forward_mode():
        return x.index_select(-1, index)
    result: torch.Tensor = _Pick.apply(x, index)  # type: ignore[no-untyped-call]
    return result


@signed
class _Pick(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(-1, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, index = inputs
        ctx.save_for_backward(index)
        ctx.width = x.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        g = grads[0]
        ones = (index.unsqueeze(1) == torch.arange(ctx.width, device=g.device)).to(g.dtype)
        return g @ ones, None


def features(x: torch.Tensor, irreps: Irreps, layout: str) -> torch.Tensor:
    """x as [N, C, D], from that or from columns in ``layout``."""
    if x.dim() == 3:
        return x
    channels = irreps[0].mul
    if layout == "ir_mul":
        return x.reshape(x.shape[0], sum(block.ir.dim for block in irreps), channels).transpose(1, 2)
    blocks, at = [], 0
    for block in irreps:
        blocks.append(x[:, at : at + block.dim].unflatten(1, (channels, block.ir.dim)))
        at += block.dim
    return torch.cat(blocks, 2)


def columns(y: torch.Tensor, irreps: Irreps, layout: str) -> torch.Tensor:
    """y [N, C, O] as columns in ``layout``."""
    if layout == "ir_mul":
        return y.transpose(1, 2).flatten(1)
    return torch.cat([part.flatten(1) for part in y.split([block.ir.dim for block in irreps], 2)], 1)
