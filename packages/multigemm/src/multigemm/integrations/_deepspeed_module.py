"""The module of DeepSpeed's inference engine. Imported when it is asked for: it needs DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.inference_utils import ActivationType, is_gated
from deepspeed.inference.v2.modules.configs import DSMoEConfig
from deepspeed.inference.v2.modules.interfaces import DSMoEBase
from deepspeed.inference.v2.modules.interfaces import DSMoERegistry as DSMoERegistry
from torch.nn import functional as F

from .._errors import OptionError, ShapeError
from ..moe import ConfigBundle, MoEConfig, Routing, moe_feed_forward, registry, route

ACTIVATIONS: dict[Any, Any] = {
    ActivationType.GELU: "gelu",
    ActivationType.RELU: "relu",
    ActivationType.SILU: "silu",
    ActivationType.GEGLU: "geglu",
    ActivationType.ReGLU: "reglu",
    ActivationType.SiGLU: "swiglu",
}
OPTIONS = ("weight_dtype", "implementation")


class DSMultigemmMoE(DSMoEBase):  # type: ignore[misc]
    """A mixture of experts for DeepSpeed's inference engine, computed by ``multigemm.moe``.

    Softmax over all experts, the best ``top_k`` of them (1 to 16), weights divided by their sum where
    ``normalize_scores``; gated and plain activations, with biases or without; float16, bfloat16 and float32,
    input and output of different dtypes too. Tokens that only pad the batch add nothing, and get zeros. On
    any device, without reading a number back from it unless the implementation does.

    ``implementation_config``: ``weight_dtype``, which has to be the input's, and ``implementation``, the name
    of one in ``multigemm.moe.registry``; without it the choice is a layer's.
    """

    @staticmethod
    def name() -> str:
        return "multigemm_moe"

    @staticmethod
    def supports_config(config: DSMoEConfig) -> bool:
        try:
            registry.choose(_bundle(config, {}), get_accelerator().current_device_name())
        except ValueError:  # of the configuration, or no implementation takes it
            return False
        return True

    def __init__(self, config: DSMoEConfig, implementation_config: dict[str, Any]) -> None:
        """Raises ``OptionError`` for options that there are not."""
        super().__init__(config, implementation_config)
        self._bundles = {bias: _bundle(config, implementation_config, bias) for bias in (False, True)}
        c = self._bundles[False].config
        if implementation_config.get("weight_dtype", c.input_dtype) != c.input_dtype:
            raise OptionError(
                f"{self.name()}: weight_dtype must be that of the input, {c.input_dtype}, "
                f"got {implementation_config['weight_dtype']}; quantised weights are not supported."
            )
        self._output = torch.empty(
            (config.max_tokens, c.hidden_size),
            dtype=c.output_dtype,
            device=get_accelerator().current_device_name(),
        )

    def transform_gate_param(self, param: torch.Tensor) -> InferenceParameter:
        """gate_w [E, H] -> the same in the input's dtype."""
        return self._transform(param)

    def transform_moe_mlp_1_param(self, param: torch.Tensor) -> InferenceParameter:
        """mlp_1_w [E, W, H] or mlp_1_b [E, W] -> the same in the input's dtype. Where gated, W is 2 I with
        the rows of gate and up in turn, as DeepSpeed's parameters have them."""
        return self._transform(param)

    def transform_moe_mlp_2_param(self, param: torch.Tensor) -> InferenceParameter:
        """mlp_2_w [E, H, I] or mlp_2_b [E, H] -> the same in the input's dtype."""
        return self._transform(param)

    def _transform(self, param: torch.Tensor) -> InferenceParameter:
        return InferenceParameter.initialize(param.to(self._bundles[False].config.input_dtype))

    @property
    def output(self) -> torch.Tensor:
        """[max_tokens, H], of which ``forward`` returns the first rows."""
        return self._output

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        batch_metadata: Any,
        gate_w: torch.Tensor,
        mlp_1_w: torch.Tensor,
        mlp_2_w: torch.Tensor,
        mlp_1_b: torch.Tensor | None = None,
        mlp_2_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states [T, H], weights as the transforms return them -> [T, H], rows of ``output``.

        ``batch_metadata`` is the batch's ``RaggedBatchWrapper``: from its number of tokens on, which is read
        on the device, rows only pad. None where none does.
        """
        bias = mlp_1_b is not None or mlp_2_b is not None
        c = self._bundles[bias].config
        if hidden_states.shape[0] > self._output.shape[0]:
            raise ShapeError(
                f"{self.name()}: hidden_states must have at most max_tokens = {self._output.shape[0]} rows, "
                f"got {hidden_states.shape[0]}."
            )
        gate_w, w1, w2 = _plain(gate_w), _plain(mlp_1_w), _plain(mlp_2_w)
        routing = route(F.linear(hidden_states, gate_w), c)
        if batch_metadata is not None:
            places = torch.arange(hidden_states.shape[0], device=hidden_states.device)
            padding = places >= batch_metadata.batch_metadata_buffer()[0]
            routing = Routing(routing.experts.masked_fill(padding.unsqueeze(1), -1), routing.weights)
        y = moe_feed_forward(
            hidden_states,
            None,
            w1.mT,
            w2.mT,
            config=self._bundles[bias],
            gate_up_proj_bias=_bias(mlp_1_b, w1) if bias else None,
            down_proj_bias=_bias(mlp_2_b, w2) if bias else None,
            routing=routing,
        )
        return self._output[: y.shape[0]].copy_(y)


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.as_subclass(torch.Tensor)


def _bias(given: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """A bias [E, out] of a weight [E, out, in]: zeros where only the other projection has one."""
    return weight.new_zeros(()).expand(weight.shape[:2]) if given is None else _plain(given)


def _bundle(config: DSMoEConfig, options: dict[str, Any], bias: bool = False) -> ConfigBundle:
    """DeepSpeed's configuration as multigemm's. Raises ``ValueError`` for what that does not have."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise OptionError(
            f"multigemm_moe: implementation_config has {', '.join(unknown)}; there are {', '.join(OPTIONS)}."
        )
    activation = ActivationType(config.activation)
    if activation not in ACTIVATIONS:
        raise OptionError(f"multigemm_moe: there is no activation {activation.name} here.")
    return ConfigBundle(
        name=options.get("implementation"),
        config=MoEConfig(
            hidden_size=config.model_dim,
            intermediate_size=config.intermediate_features,
            num_experts=config.n_experts,
            top_k=config.top_k,
            input_dtype=_dtype(config.input_dtype),
            output_dtype=_dtype(config.output_dtype),
            activation=ACTIVATIONS[activation],
            gelu_approximate="tanh",  # that of DeepSpeed's kernels
            gate_up_layout="interleaved" if is_gated(activation) else "concatenated",
            expert_bias=bias,
            renormalize=config.normalize_scores,
        ),
    )


def _dtype(value: Any) -> torch.dtype:
    found: torch.dtype = getattr(value, "value", value)
    return found
