"""The first product of the layer together with the gather before it, or with the activation after it.

    h[p] = x[permutation[p] // k] @ w[e] + bias[e],   e the expert of place p

The gathered rows are as large as all of x times k. They are not kept for backward, which gathers them again:
that takes a small part of the product's own time. Letters and places as in ``_composed``.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _checks
from ..ops import _route
from ..ops._library import LIB, Function, register_fake
from ._composed import Activation, Places
from ._operators import PLACES, slices

LIB.define(f"moe_up(Tensor x, Tensor w, Tensor? bias, {PLACES}, str precision, str implementation) -> Tensor")
_ops = torch.ops.multigemm


def _up(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    permutation: torch.Tensor,
    inverse: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    precision: str,
    implementation: str,
) -> torch.Tensor:
    rows = _ops.moe_spread(x, permutation, inverse, ends, k)
    h: torch.Tensor = _ops.grouped_mm(rows, w, ends, True, bias, None, precision, implementation)
    return h


def _fake(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> torch.Tensor:
    return x.new_empty((others[0].shape[0], w.shape[-1]))


class _Up(Function):
    operator = _ops.moe_up.default

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _Up.below(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, *places, ctx.k, precision, implementation = inputs
        x_needed, w_needed = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if w_needed else None, w if x_needed else None, *places)
        ctx.dtype, ctx.options = x.dtype, (precision, implementation)

    @staticmethod
    def backward(ctx: Any, gh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, permutation, inverse, ends = ctx.saved_tensors
        places = Places(permutation, inverse, ends, ctx.k)
        gx = gw = gbias = None
        if ctx.needs_input_grad[1]:  # first, so that the gathered rows are gone before others come
            gw = _ops.grouped_mm_wgrad(_ops.moe_spread(x, *places), gh, ends, True, False, None, *ctx.options)
        if ctx.needs_input_grad[2]:
            ones = gh.new_ones(()).expand(gh.shape[0], 1)
            gbias = _ops.grouped_mm_wgrad(ones, gh, ends, True, False, None, *ctx.options).squeeze(-2)
        if ctx.needs_input_grad[0]:
            rows = _ops.grouped_mm(gh, w.mT, ends, True, None, None, *ctx.options)
            gx = _ops.moe_collect(rows, None, None, *places, ctx.dtype)
        return gx, gw, gbias, *(None,) * 6


def activated(
    x: torch.Tensor,
    w: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    how: Activation,
    options: dict[str, Any],
    places: Places | None = None,
) -> torch.Tensor | None:
    """``act(rows @ w[e] + bias[e])`` [P, I] of a backend; None where there is none.

    The rows are x [P, H]; with places, those of the tokens x [T, H] in expert order. Rounded once where one
    kernel computes both. Without derivatives: see ``_direct.possible``.
    """
    precision, name = options["precision"], options["implementation"]
    _checks.grouped_mm(x, w, ends, True, bias, None, precision, name)
    run = _route.of_backend("grouped_mm", _ops.native_moe_up.default, x.device, name or "")
    if run is None:
        return None
    k = 1 if places is None else places.k
    out = x.new_empty((x.shape[0] * k, w.shape[-1] // (2 if how.gated else 1)))
    permutation, inverse = (None, None) if places is None else places[:2]
    run(x, w, ends, bias, permutation, inverse, out, k, *how, precision or "")
    return out


_READS_TOKENS: dict[tuple[Any, ...], bool] = {}


def reads_tokens(
    x: torch.Tensor,
    w: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    how: Activation,
    options: dict[str, Any],
) -> bool:
    """Whether ``activated`` reads x [T, H] where it is, so that nobody need gather it.

    Values do not depend on the answer, so one that was found for the same sizes stays.
    """
    if x.device.type == "cpu":
        return False
    precision, name = options["precision"], options["implementation"]
    key = (x.device, x.dtype, x.shape, x.stride(), w.shape, w.stride(), k, how, precision, name)
    found = _READS_TOKENS.get(key)
    if found is None:
        _checks.grouped_mm(x, w, ends, True, bias, None, precision, name)
        answers: list[bool] = []

        def ask(*arguments: Any) -> None:
            answers.append(_ops.native_moe_up_reads_tokens(*arguments))

        run = _route.of_backend("grouped_mm", ask, x.device, name or "")
        if run is not None:
            run(x, w, ends, bias, k, how.gated, how.interleaved, precision or "")
        if len(_READS_TOKENS) >= 4096:
            _READS_TOKENS.clear()
        found = _READS_TOKENS[key] = bool(answers and answers[0])
    return found


LIB.impl("moe_up", _up, "CompositeExplicitAutograd")
LIB.impl("moe_up", _Up.run, "Autograd")
register_fake("moe_up", _fake)
torch.library.register_vmap("multigemm::moe_up", slices(_ops.moe_up.default), lib=LIB)
