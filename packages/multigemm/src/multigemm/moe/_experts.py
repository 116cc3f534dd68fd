"""The built-in implementations: sort by expert, two grouped products with the activation between, combine.

They differ in who computes the products. ``multigemm_moe`` leaves them to ``grouped_mm`` and so to the
backend; ``pytorch_multi_gemm_moe`` has PyTorch compute one product for each expert, which works on any
device and is what the other is compared with.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch.utils.checkpoint import checkpoint

from .. import _choice, _dispatch
from .._checks import DTYPES
from .._errors import BackendError
from ..ops import GroupOrder, grouped_mm, sort_by_group
from ._activation import activate
from ._config import MoEConfig
from ._implementation import MoEImplementation, Options, Support
from ._permutation import combine, spread
from ._routing import Routing


class GroupedExperts(MoEImplementation):
    """The steps that both implementations share."""

    @classmethod
    def supports_config(cls, config: MoEConfig, device: torch.device) -> Support:
        for field in ("input_dtype", "output_dtype"):
            dtype = getattr(config, field)
            if dtype is not None and dtype not in DTYPES:
                names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
                return Support(
                    False, f"{field} is {str(dtype).removeprefix('torch.')}; products have {names}"
                )
        return Support(True)

    def product_options(self) -> dict[str, Any]:
        """The keywords of ``grouped_mm`` that say who computes the products."""
        return {}

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        gate_up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config, options = self.config, self.product_options()
        order = sort_by_group(routing.experts.reshape(-1), config.num_experts)
        hidden = self._hidden
        if config.recompute and torch.is_grad_enabled():
            h = checkpoint(
                hidden,
                x,
                order,
                gate_up_proj,
                gate_up_proj_bias,
                options,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            h = hidden(x, order, gate_up_proj, gate_up_proj_bias, options)
        rows = grouped_mm(h, down_proj, order.group_sizes, bias=down_proj_bias, **options)
        # The rows of dropped slots are zeros; their weights have to be too, whatever the caller put there.
        kept = (routing.experts >= 0) & (routing.experts < config.num_experts)
        weights = routing.weights.masked_fill(~kept, 0)
        return combine(rows, weights, order, config.output_dtype or rows.dtype)

    def _hidden(
        self,
        x: torch.Tensor,
        order: GroupOrder,
        gate_up_proj: torch.Tensor,
        bias: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """x [T, H] -> the activation's output [T k, I], in expert order."""
        rows = spread(x, order, self.config.top_k)
        return activate(grouped_mm(rows, gate_up_proj, order.group_sizes, bias=bias, **options), self.config)


class ProductOptions(Options):
    """Options of "multigemm_moe", passed to ``grouped_mm``."""

    implementation: str | None = None
    precision: Literal["ieee", "tf32"] | None = None


class MultigemmMoE(GroupedExperts):
    """Products by ``grouped_mm``: the native backend's where one serves the device."""

    name = "multigemm_moe"
    options_type: ClassVar[type[Options]] = ProductOptions

    @classmethod
    def supports_config(cls, config: MoEConfig, device: torch.device) -> Support:
        try:
            _dispatch.backend_for(device.type)
        except BackendError as error:
            return Support(
                False, f"grouped_mm has no backend for {device.type!r}: {str(error).splitlines()[0]}"
            )
        return super().supports_config(config, device)

    def product_options(self) -> dict[str, Any]:
        # A pin of the products is read once, so that a recomputation in backward takes it too.
        name = self.options.implementation or _choice.pinned() or None  # type: ignore[attr-defined]
        return {"implementation": name, "precision": self.options.precision}  # type: ignore[attr-defined]


class PyTorchMoE(GroupedExperts):
    """Products by PyTorch, one for each expert. On a GPU that reads the group sizes back."""

    name = "pytorch_multi_gemm_moe"

    def product_options(self) -> dict[str, Any]:
        return {"implementation": "reference"}
