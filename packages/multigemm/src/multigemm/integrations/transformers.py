"""transformers: ``experts_implementation="multigemm"``.

    from multigemm.integrations import transformers as adapter
    adapter.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="multigemm")

Every model whose experts are chosen by name takes it: the weights stay where they are and in the layout that
they have, and the router stays the model's. Needs transformers 5: ``pip install "multigemm[transformers]"``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ..moe import MoEConfig, Routing, moe_feed_forward, registry
from ._composed import composed_experts
from ._optional import require
from ._recognise import Fields, recognise

NAME = "multigemm"


def register(name: str = NAME, *, implementation: str | None = None) -> str:
    """Let models take ``experts_implementation=name``; returns the name.

    ``implementation`` pins one of ``multigemm.moe.registry``. Without it the choice is that of a layer:
    ``multigemm.moe.use``, the environment, the accelerator, the default. Registering again replaces.

    Raises ``ImportError`` where transformers is absent or older than 5, ``OptionError`` for an
    implementation that nobody provides.
    """
    if implementation is not None:
        registry.get(implementation)
    forward: Callable[..., torch.Tensor] = experts_forward
    if implementation is not None:
        forward = functools.partial(experts_forward, implementation=implementation)
    require("transformers.integrations.moe", "transformers").ExpertsInterface.register(name, forward)
    return name


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """The forward of an experts module of transformers: hidden_states [T, H], experts and weights [T, k].

    An activation that is one of ``MoEConfig``'s goes to the chosen implementation of the layer; any other is
    the module's own, between grouped products. An expert outside 0 .. E - 1, as expert parallelism marks
    those of other ranks, adds exact zeros. -> [T, H] of the dtype of hidden_states.
    """
    up, up_bias = _parameters(module, "gate_up_proj" if module.has_gate else "up_proj")
    down, down_bias = _parameters(module, "down_proj")
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):  # a norm may give float32 to weights in bfloat16
        x = x.to(up.dtype)
    routing = Routing(top_k_index, top_k_weights)
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    key = "" if norm is not None else _key(module, x.shape[-1], top_k_index.shape[-1])
    if not key:
        activation = module._apply_gate if module.has_gate else module.act_fn
        biases = {"up_bias": up_bias, "down_bias": down_bias}
        y = composed_experts(x, routing, up, down, activation, **biases, norm=norm)
    else:
        y = moe_feed_forward(
            x,
            None,
            up,
            down,
            config=getattr(_configs, key),
            gate_up_proj_bias=up_bias,
            down_proj_bias=down_bias,
            routing=routing,
            implementation=implementation,
        )
    return y.to(hidden_states.dtype)


def _parameters(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A projection [E, in, out] and its bias [E, out]."""
    weight: torch.Tensor = getattr(module, name)
    bias: torch.Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    return weight if module.is_transposed else weight.mT, bias


def _key(module: Any, hidden: int, k: int) -> str:
    """The attribute of ``_configs`` that says what the module computes; empty where ``MoEConfig`` has no
    word for it."""
    found = recognise(module)
    if found is None or not 1 <= k <= min(16, module.num_experts):
        return ""
    experts, *widths = module.down_proj.shape
    inner = widths[0] if module.is_transposed else widths[1]
    return _made(hidden, inner, experts, k, module.has_bias, found)


# The outcome is a constant to torch.compile, and the configuration one of the attributes that it can read:
# this is what torch.compiler.assume_constant_result sets.
_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Configs:
    """Configurations that were made."""


_configs = _Configs()
_count = itertools.count()


@functools.cache
def _made(hidden: int, inner: int, experts: int, k: int, bias: bool, found: Fields) -> str:
    config = MoEConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=experts,
        top_k=k,
        expert_bias=bias,
        **dict(found),
    )
    key = f"config_{next(_count)}"
    setattr(_configs, key, config)
    return key
