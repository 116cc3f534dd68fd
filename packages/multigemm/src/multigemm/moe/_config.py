"""What a layer computes (``MoEConfig``), and with what (``ConfigBundle``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveInt,
    model_validator,
)

Activation = Literal["swiglu", "geglu", "reglu", "clamped_swiglu", "silu", "gelu", "relu"]
GATED = ("swiglu", "geglu", "reglu", "clamped_swiglu")


def _dtype(value: Any) -> Any:
    """A name such as "bfloat16" or "torch.bfloat16" as the dtype; anything else as it is."""
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
        value = found if isinstance(found, torch.dtype) else value
    if isinstance(value, torch.dtype) and not value.is_floating_point:
        raise ValueError(f"must be a floating-point dtype, got {value}")
    return value


DType = Annotated[
    torch.dtype,
    BeforeValidator(_dtype),
    PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."), return_type=str),
]


class _Keyed(BaseModel):
    """What can be asked for its implementation from within a graph of ``torch.compile``."""

    def _key(self, name: str | None, device: str, dtype: torch.dtype) -> str:
        """The attribute of ``registry.instances`` that holds the implementation for such tensors."""
        from ._registry import registry

        return registry.key(self._bundle(name), torch.device(device), dtype)

    # The choice is Python over names and the environment: torch.compile takes its outcome at tracing for a
    # constant. This is what torch.compiler.assume_constant_result sets, without its import of the compiler.
    _key._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _bundle(self, name: str | None) -> ConfigBundle:
        raise TypeError(f"{type(self).__name__} is no configuration")


class MoEConfig(_Keyed):
    """What a mixture-of-experts feed-forward layer computes. Immutable; a bad value is a ``ValueError``.

    Shapes below: T tokens, H = ``hidden_size``, I = ``intermediate_size``, E = ``num_experts``,
    k = ``top_k``. The formulas with their sources are in docs/moe.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    hidden_size: PositiveInt
    """H, width of the tokens."""
    intermediate_size: PositiveInt
    """I, width inside an expert, after the gate."""
    num_experts: PositiveInt
    """E, routed experts."""
    top_k: int = Field(ge=1, le=16)
    """k, experts of each token."""

    input_dtype: DType = torch.float32
    """Of the tokens and of the experts' weights."""
    output_dtype: DType | None = None
    """Of the result; None is what the experts' products give: the input's, or autocast's."""

    activation: Activation = "swiglu"
    """Gated: swiglu, geglu, reglu, clamped_swiglu (that of gpt-oss). Plain: silu, gelu, relu."""
    gelu_approximate: Literal["none", "tanh"] = "none"
    """How gelu and geglu compute the normal distribution, as ``torch.nn.functional.gelu`` has it."""
    clamp_alpha: float = 1.702
    """clamped_swiglu: factor inside the sigmoid."""
    clamp_limit: float = Field(default=7.0, gt=0)
    """clamped_swiglu: bound of gate (above) and up (both sides)."""
    gate_up_layout: Literal["concatenated", "interleaved"] = "concatenated"
    """Columns of every first projection and of its bias where the activation is gated: all of the gate,
    then all of up; or gate and up in turn, as gpt-oss has them."""
    expert_bias: bool = False
    """Whether both projections of the experts have biases."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores, over all experts."""
    score_correction_bias: bool = False
    """Whether experts are selected by score plus a bias that takes no part in their weights."""
    num_expert_groups: PositiveInt = 1
    """Groups of adjacent experts for grouped top-k; 1 selects among all."""
    top_k_groups: PositiveInt = 1
    """Groups among which a token selects, those of the largest ``group_score``."""
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    """Score of a group: sum of its two best (DeepSeek-V3), or its best (DeepSeek-V2)."""
    renormalize: bool = True
    """Whether the k weights of a token are divided by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights, after renormalisation."""
    router_bias: bool = False
    """Whether the router's projection has a bias."""
    router_dtype: DType | None = None
    """In which the logits are computed; None is the input's. Scores have at least float32 in any case."""

    shared_intermediate_size: int = Field(default=0, ge=0)
    """Width inside the shared expert, which every token takes; 0 is none. Several shared experts are one
    of their summed width."""
    shared_gate: bool = False
    """Whether the shared expert is weighted by the sigmoid of a projection of the token (Qwen2-MoE)."""

    recompute: bool = False
    """Whether the gathered tokens, the first product and the activation are computed again in backward
    instead of being kept."""

    @property
    def gated(self) -> bool:
        """Whether the activation takes two inputs, gate and up."""
        return self.activation in GATED

    @property
    def up_width(self) -> int:
        """Columns of the first projection: 2 I where gated (gate and up), I otherwise."""
        return self.intermediate_size * (2 if self.gated else 1)

    def _bundle(self, name: str | None) -> ConfigBundle:
        return ConfigBundle(config=self, name=name)

    @model_validator(mode="after")
    def _fits(self) -> MoEConfig:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts = {self.num_experts}, got {self.top_k}")
        groups, size = self.num_expert_groups, self.num_experts // self.num_expert_groups
        if self.num_experts % groups:
            raise ValueError(f"num_expert_groups must divide num_experts = {self.num_experts}, got {groups}")
        if self.top_k_groups > groups:
            raise ValueError(
                f"top_k_groups must be at most num_expert_groups = {groups}, got {self.top_k_groups}"
            )
        if groups > 1 and self.top_k > self.top_k_groups * size:
            raise ValueError(
                f"top_k must be at most the {self.top_k_groups * size} experts of top_k_groups = "
                f"{self.top_k_groups} groups, got {self.top_k}"
            )
        if groups > 1 and self.group_score == "top2_sum" and size < 2:
            raise ValueError('group_score="top2_sum" needs two experts or more in each group, got 1')
        if self.gate_up_layout == "interleaved" and not self.gated:
            raise ValueError(
                f'gate_up_layout="interleaved" needs a gated activation, got {self.activation!r}'
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise ValueError("shared_gate needs a shared expert: shared_intermediate_size must not be 0")
        return self


class ConfigBundle(_Keyed):
    """A configuration together with the implementation that is to compute it.

    ``name`` has the strength of an argument. None leaves it to ``multigemm.moe.use``, to the variable
    MULTIGEMM_MOE_IMPLEMENTATION, to the accelerator's property "multi_gemm_moe" and to the default, in
    this order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    config: MoEConfig
    implementation_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the implementation called ``name``; one that is fallen back to gets none."""
    on_refusal: Literal["raise", "fall_back"] | None = None
    """What follows where the chosen implementation does not support the configuration. None raises where
    a user named it (argument, context, environment) and falls back where the accelerator did."""
    chain: tuple[str, ...] | None = None
    """The implementations to fall back to, in order; None is the registry's chain."""

    def _bundle(self, name: str | None) -> ConfigBundle:
        if name is None or name == self.name:
            return self
        return self.model_copy(update={"name": name, "implementation_config": {}})

    @model_validator(mode="after")
    def _named(self) -> ConfigBundle:
        if self.implementation_config and self.name is None:
            raise ValueError("implementation_config needs the name of the implementation that it is for")
        return self
