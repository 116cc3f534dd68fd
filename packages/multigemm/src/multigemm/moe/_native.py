"""``multigemm_native_moe``: everything around the two products by native kernels too.

    router      scores, top-k and the order of the slots in one or two launches
    gather      rows in expert order, without a read-back; none where the first product reads them by index
    activation  one pass, which also multiplies by the router's weights, so that the second product's result
                need not be kept for their gradients; where it has a bias, the combination weighs instead
    combine     a sum over each token's slots in a fixed order, in float32 or float64

The kernels are the same source on every device that a backend serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .. import _dispatch
from .._checks import _autocast_dtype
from ..ops import grouped_mm
from ..ops._direct import possible
from . import _composed, _product, _routing
from ._composed import Activation, Places
from ._config import MoEConfig
from ._experts import MultigemmMoE
from ._implementation import Support
from ._operators import rows_of
from ._routing import Routing

MOST_EXPERTS, MOST_GROUPS = 1024, 64
_KINDS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
_NUMBERS = {
    "silu": _composed.SILU,
    "gelu": _composed.GELU,
    "relu": _composed.RELU,
    "clamped_swiglu": _composed.CLAMPED,
}
_ops = torch.ops.multigemm


def activation_of(config: MoEConfig) -> Activation:
    kind = _NUMBERS[_KINDS.get(config.activation, config.activation)]
    if kind == _composed.GELU and config.gelu_approximate == "tanh":
        kind = _composed.GELU_TANH
    interleaved = config.gate_up_layout == "interleaved"
    return Activation(kind, config.gated, interleaved, config.clamp_alpha, config.clamp_limit)


class NativeMoE(MultigemmMoE):
    """Products by ``grouped_mm`` and all that is around them by the backend's own kernels."""

    name = "multigemm_native_moe"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activation = activation_of(self.config)
        c = self.config
        self._scores = (c.score_function == "sigmoid", c.renormalize, c.routed_scaling_factor)
        self._groups = (c.num_expert_groups, c.top_k_groups, c.group_score == "max")

    @classmethod
    def supports_config(cls, config: MoEConfig, device: torch.device) -> Support:
        support = super().supports_config(config, device)
        if not support:
            return support
        if device.type != "meta" and _dispatch.backend_for(device.type) is None:
            return Support(False, f"no backend serves {device.type!r}, and the kernels are a backend's")
        for field, most in (("num_experts", MOST_EXPERTS), ("num_expert_groups", MOST_GROUPS)):
            if getattr(config, field) > most:
                return Support(False, f"{field} is {getattr(config, field)}; its kernels take at most {most}")
        return support

    def _correction(
        self, logits: torch.Tensor, score_correction_bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The bias in the dtype of the scores."""
        if score_correction_bias is None:
            return None
        return score_correction_bias.detach().to(_composed.wide(logits.dtype)).contiguous()

    def _route(
        self, logits: torch.Tensor, score_correction_bias: torch.Tensor | None
    ) -> tuple[Routing, Places]:
        _routing.check(logits, self.config, score_correction_bias)
        correction = self._correction(logits, score_correction_bias)
        k = self.config.top_k
        experts, weights, permutation, inverse, ends = _ops.moe_route(
            logits, correction, k, *self._scores, *self._groups
        )
        return Routing(experts, weights, logits), Places(permutation, inverse, ends, k)

    def route(self, logits: torch.Tensor, score_correction_bias: torch.Tensor | None = None) -> Routing:
        return self._route(logits, score_correction_bias)[0]

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        gate_up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        permutation, inverse, ends = _ops.moe_order(routing.experts, self.config.num_experts)
        return self._experts(
            x,
            routing.weights,
            Places(permutation, inverse, ends, self.config.top_k),
            gate_up_proj,
            down_proj,
            gate_up_proj_bias,
            down_proj_bias,
        )

    def feed_forward(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        score_correction_bias: torch.Tensor | None,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        gate_up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = (gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
        if (
            not torch.compiler.is_compiling()
            and possible(x, logits)
            and possible(gate_up_proj, down_proj, gate_up_proj_bias)
            and (down_proj_bias is None or possible(x, down_proj_bias))
        ):
            return self._infer(x, logits, score_correction_bias, *weights)
        routing, places = self._route(logits, score_correction_bias)
        return self._experts(x, routing.weights, places, *weights)

    def _experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        places: Places,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        gate_up_proj_bias: torch.Tensor | None,
        down_proj_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        options = self.product_options()
        dtype = _autocast_dtype(x)
        weights = weights.to(_composed.wide(dtype))
        early = weights if down_proj_bias is None else None
        arguments = (x.to(dtype), early, places, gate_up_proj, gate_up_proj_bias, options)
        if self.config.recompute and torch.is_grad_enabled():
            a = checkpoint(self._inner, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            a = self._inner(*arguments)
        rows = grouped_mm(a, down_proj, offsets=places.ends, bias=down_proj_bias, **options)
        late = None if down_proj_bias is None else weights
        out_dtype = self.config.output_dtype or rows.dtype
        y: torch.Tensor = _ops.moe_collect(rows, late, None, *places, out_dtype)
        return y

    def _inner(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        places: Places,
        gate_up_proj: torch.Tensor,
        bias: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """x [T, H] -> the input of the second product [T k, I], in expert order."""
        w = gate_up_proj.to(x.dtype)
        b = None if bias is None else bias.to(x.dtype)
        h = _ops.moe_up(x, w, b, *places, options["precision"] or "", options["implementation"] or "")
        result: torch.Tensor = _ops.moe_activate(h, weights, *places, *self._activation)
        return result

    def _infer(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        score_correction_bias: torch.Tensor | None,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        gate_up_proj_bias: torch.Tensor | None,
        down_proj_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same without what derivatives need: kernels called straight away, and the router gathers too,
        unless the first product reads tokens by index."""
        _routing.check(logits, self.config, score_correction_bias)
        c, options, kind = self.config, self.product_options(), _composed.wide(logits.dtype)
        tokens, k = x.shape[0], c.top_k
        slots = tokens * k
        experts = x.new_empty((tokens, k), dtype=torch.int64)
        weights = x.new_empty((tokens, k), dtype=kind)
        permutation = x.new_empty(slots, dtype=torch.int32)
        inverse = x.new_empty(slots, dtype=torch.int32)
        ends = x.new_empty(c.num_experts, dtype=torch.int32)
        x, places = rows_of(x), Places(permutation, inverse, ends, k)
        arguments = (gate_up_proj, ends, gate_up_proj_bias)
        # Where the first product's kernel reads x by index, no row of it is written in expert order.
        by_index = _product.reads_tokens(x, *arguments, k, self._activation, options)
        rows = None if by_index else x.new_empty((slots, x.shape[1]))
        correction = self._correction(logits, score_correction_bias)
        sigmoid, renormalize, scale = self._scores
        groups, top_groups, best = self._groups
        _ops.native_moe_route.default(
            logits, correction, experts, weights, permutation, inverse, ends, None if by_index else x, rows,
            int(sigmoid), renormalize, groups, top_groups, int(best), scale,
        )  # fmt: skip
        if kind != _composed.wide(x.dtype):
            weights = weights.to(_composed.wide(x.dtype))
        if rows is None:
            a = _product.activated(x, *arguments, self._activation, options, places)
        else:
            a = _product.activated(rows, *arguments, self._activation, options)
        if a is None:  # the products are not a backend's
            rows = _ops.moe_spread(x, *places) if rows is None else rows
            h = grouped_mm(rows, gate_up_proj, offsets=ends, bias=gate_up_proj_bias, **options)
            a = h.new_empty((slots, c.intermediate_size))
            _ops.native_moe_activate.default(h, permutation, ends, None, a, k, *self._activation)
        rows = grouped_mm(a, down_proj, offsets=ends, bias=down_proj_bias, **options)
        y = rows.new_empty((tokens, rows.shape[1]), dtype=c.output_dtype or rows.dtype)
        # The combination weighs: no gradient asks for the second product without its weights.
        _ops.native_moe_collect.default(rows, inverse, ends, weights, None, y, k)
        return y
