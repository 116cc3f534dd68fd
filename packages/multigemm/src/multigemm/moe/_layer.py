"""The layer: router, routed experts, shared expert; as a function and as a module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .._checks import _autocast_dtype
from .._errors import DeviceError, DTypeError, OptionError, ShapeError
from ._activation import activate
from ._config import ConfigBundle, MoEConfig
from ._implementation import MoEImplementation
from ._registry import MoEExplanation, registry
from ._routing import Routing


def moe_feed_forward(
    x: torch.Tensor,
    router_weight: torch.Tensor | None,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    config: MoEConfig | ConfigBundle,
    router_bias: torch.Tensor | None = None,
    score_correction_bias: torch.Tensor | None = None,
    gate_up_proj_bias: torch.Tensor | None = None,
    down_proj_bias: torch.Tensor | None = None,
    shared_gate_up_proj: torch.Tensor | None = None,
    shared_down_proj: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    routing: Routing | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Compute a mixture-of-experts feed-forward layer.

        y[t] = sum over j of p[t, j] * E_e(x[t]),  e = experts[t, j];   + shared(x[t])
        E_e(x) = activation(x @ gate_up_proj[e] + b1[e]) @ down_proj[e] + b2[e]

    with the router's p and experts as ``multigemm.moe.route`` has them. Sources of the formulas are in
    docs/moe.md. Below, W is 2 I (gate and up) where the activation is gated and I where it is plain; V is
    the same for the shared expert.

    Args:
        x: [..., H]; float64, float32, float16 or bfloat16.
        router_weight: [E, H], in any floating dtype; None where ``routing`` is given.
        gate_up_proj: [E, H, W], any strides; dtype of x, except under autocast.
        down_proj: [E, I, H], as gate_up_proj.
        config: what is computed; in a ``ConfigBundle``, with what too.
        router_bias, score_correction_bias: [E].
        gate_up_proj_bias, down_proj_bias: [E, W] and [E, H].
        shared_gate_up_proj, shared_down_proj, shared_gate: [H, V], [S, H] and [H, 1], S =
            ``config.shared_intermediate_size``.
        routing: experts and weights of one's own, [T, k] each, T the number of tokens. A slot whose expert
            is outside 0 .. E - 1, such as -1, is dropped: it adds exact zeros to y and to every gradient.
        implementation: a name, which wins over that of a ``ConfigBundle``.

    Returns:
        y [..., H] of ``config.output_dtype``. Differentiable to any order in x, the weights, the biases and
        the routing's weights. The same call on the same device gives the same bits: no sum uses atomics.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError: a bad call (``ValueError`` or ``TypeError``).
    """
    bundle = config
    c = bundle.config if isinstance(bundle, ConfigBundle) else bundle
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"moe: x must be a torch.Tensor [..., {c.hidden_size}], got {type(x).__name__}.")
    gates = c.up_width // c.intermediate_size
    _given("router_weight", router_weight, (c.num_experts, c.hidden_size), x, routing is None)
    _given("router_bias", router_bias, (c.num_experts,), x, c.router_bias and routing is None)
    _given("gate_up_proj", gate_up_proj, (c.num_experts, c.hidden_size, c.up_width), x, True)
    _given("down_proj", down_proj, (c.num_experts, c.intermediate_size, c.hidden_size), x, True)
    _given("gate_up_proj_bias", gate_up_proj_bias, (c.num_experts, c.up_width), x, c.expert_bias)
    _given("down_proj_bias", down_proj_bias, (c.num_experts, c.hidden_size), x, c.expert_bias)
    shared = c.shared_intermediate_size
    _given("shared_gate_up_proj", shared_gate_up_proj, (c.hidden_size, gates * shared), x, shared > 0)
    _given("shared_down_proj", shared_down_proj, (shared, c.hidden_size), x, shared > 0)
    _given("shared_gate", shared_gate, (c.hidden_size, 1), x, c.shared_gate)
    if x.dim() < 1 or x.shape[-1] != c.hidden_size:
        raise ShapeError(f"moe: x must have shape [..., {c.hidden_size}], got {list(x.shape)}.")
    dtype = _autocast_dtype(x)
    for name, w in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if _autocast_dtype(w) != dtype:
            raise DTypeError(f"moe: {name} must have the dtype of x, {x.dtype}, got {w.dtype}; convert one.")

    key = bundle._key(implementation, str(x.device), dtype)
    made: MoEImplementation = getattr(registry.instances, key)
    tokens = x.reshape(-1, c.hidden_size)
    weights = (gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    if routing is None:
        logits = _logits(tokens, router_weight, router_bias, c)
        y = made.feed_forward(tokens, logits, score_correction_bias, *weights)
    else:
        check_routing(routing, tokens.shape[0], c, x)
        y = made.experts(tokens, routing, *weights)
    if shared_gate_up_proj is not None and shared_down_proj is not None:
        s = shared_expert(tokens, shared_gate_up_proj, shared_down_proj, shared_gate, c)
        y = y + s.to(y.dtype)
    return y.view(x.shape)


def _given(
    name: str, value: torch.Tensor | None, shape: tuple[int, ...], x: torch.Tensor, wanted: bool
) -> None:
    """``value`` is there where it is wanted, and has that shape and x's device."""
    if value is None:
        if wanted:
            raise OptionError(f"moe: {name} {list(shape)} is missing; the configuration asks for it.")
        return
    if not wanted and name not in ("router_weight", "router_bias"):
        raise OptionError(f"moe: {name} was given, and the configuration has none.")
    if tuple(value.shape) != shape:
        raise ShapeError(f"moe: {name} must have shape {list(shape)}, got {list(value.shape)}.")
    if value.device != x.device:
        raise DeviceError(
            f"moe: {name} must be on the device of x, {x.device}, got {value.device}; "
            f"move it with {name}.to(x.device)."
        )


def shared_expert(
    tokens: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate: torch.Tensor | None,
    config: MoEConfig,
) -> torch.Tensor:
    """The expert that every token takes: tokens [T, H], weights [H, V], [S, H] and [H, 1] -> [T, H]."""
    y = activate(tokens @ gate_up_proj, config) @ down_proj
    return y if gate is None else y * torch.sigmoid(tokens @ gate)


def check_routing(routing: Routing, tokens: int, config: MoEConfig, x: torch.Tensor) -> None:
    want = (tokens, config.top_k)
    for name, value in (("experts", routing.experts), ("weights", routing.weights)):
        _given(f"routing.{name}", value, want, x, True)
    if routing.experts.is_floating_point() or not routing.weights.is_floating_point():
        raise DTypeError(
            f"moe: routing must have integer experts and floating-point weights, "
            f"got {routing.experts.dtype} and {routing.weights.dtype}."
        )


def _logits(
    tokens: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, config: MoEConfig
) -> torch.Tensor:
    """tokens [T, H] -> [T, E], in ``config.router_dtype`` even under autocast."""
    if weight is None:
        raise OptionError("moe: router_weight is missing; give it, or a routing.")
    dtype = config.router_dtype
    if dtype is None:
        return F.linear(tokens, weight.to(tokens.dtype), None if bias is None else bias.to(tokens.dtype))
    with torch.autocast(tokens.device.type, enabled=False):
        return F.linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class MoEFeedForward(nn.Module):
    """A mixture-of-experts feed-forward layer: ``moe_feed_forward`` with its weights.

    Parameters, with W = 2 I (gate and up) where the activation is gated and I where it is plain:
    ``router.weight`` [E, H] (and ``router.bias`` [E]), ``gate_up_proj`` [E, H, W], ``down_proj`` [E, I, H],
    ``gate_up_proj_bias`` [E, W] and ``down_proj_bias`` [E, H] with ``expert_bias``; ``shared_gate_up_proj``
    [H, 2 S or S], ``shared_down_proj`` [S, H] and ``shared_gate`` [H, 1] with a shared expert. The buffer
    ``score_correction_bias`` [E] is float32 and part of the state dict, as it is learned, though not by
    gradients. There is no other state: what an implementation needs it derives at each call.

    Args:
        config: what the layer computes; a ``ConfigBundle`` says with what too.
        implementation: an implementation's name; None leaves it to the bundle, ``multigemm.moe.use``, the
            environment, the accelerator and the default, in this order, at each call.
        device: where the weights are made; their dtype is ``config.input_dtype``.

    Raises:
        OptionError: there is no implementation of that name, or its options do not fit.
    """

    score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        config: MoEConfig | ConfigBundle,
        *,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        _experts: int | None = None,
    ) -> None:
        super().__init__()
        bundle = config._bundle(implementation)
        if bundle.name is not None:
            registry.get(bundle.name)(bundle.config, bundle.implementation_config)
        self.bundle = bundle
        c = self.config = bundle.config
        like: dict[str, Any] = {"device": device, "dtype": c.input_dtype}
        e, h, i, s = c.num_experts, c.hidden_size, c.intermediate_size, c.shared_intermediate_size
        self.router = nn.Linear(h, e, bias=c.router_bias, **like)
        bias = torch.zeros(e, dtype=torch.float32, device=device) if c.score_correction_bias else None
        self.register_buffer("score_correction_bias", bias)
        e = e if _experts is None else _experts  # fewer than the router knows where others are elsewhere
        self.gate_up_proj = nn.Parameter(torch.empty(e, h, c.up_width, **like))
        self.down_proj = nn.Parameter(torch.empty(e, i, h, **like))
        self.gate_up_proj_bias = self._optional(c.expert_bias, (e, c.up_width), like)
        self.down_proj_bias = self._optional(c.expert_bias, (e, h), like)
        self.shared_gate_up_proj = self._optional(s > 0, (h, c.up_width // i * s), like)
        self.shared_down_proj = self._optional(s > 0, (s, h), like)
        self.shared_gate = self._optional(c.shared_gate, (h, 1), like)
        self.reset_parameters()

    @staticmethod
    def _optional(there: bool, shape: tuple[int, ...], like: dict[str, Any]) -> nn.Parameter | None:
        return nn.Parameter(torch.empty(shape, **like)) if there else None

    def reset_parameters(self) -> None:
        """Draw every weight and bias as ``nn.Linear`` does, uniform within 1 / sqrt(inputs)."""
        c = self.config
        self.router.reset_parameters()
        fans = {
            "gate_up_proj": c.hidden_size,
            "gate_up_proj_bias": c.hidden_size,
            "down_proj": c.intermediate_size,
            "down_proj_bias": c.intermediate_size,
            "shared_gate_up_proj": c.hidden_size,
            "shared_down_proj": c.shared_intermediate_size,
            "shared_gate": c.hidden_size,
        }
        for name, fan in fans.items():
            parameter = getattr(self, name)
            if parameter is not None:
                nn.init.uniform_(parameter, -1 / math.sqrt(fan), 1 / math.sqrt(fan))
        if self.score_correction_bias is not None:
            nn.init.zeros_(self.score_correction_bias)

    def route(self, x: torch.Tensor) -> Routing:
        """The routing of x [..., H], with the logits: for a balancing loss, or to drop slots by setting
        experts to -1 before ``forward(x, routing=...)``."""
        c = self.config
        key = self.bundle._key(None, str(x.device), _autocast_dtype(x))
        made: MoEImplementation = getattr(registry.instances, key)
        tokens = x.reshape(-1, c.hidden_size)
        logits = _logits(tokens, self.router.weight, self.router.bias, c)
        return made.route(logits, self.score_correction_bias)

    def forward(self, x: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        """x [..., H] -> [..., H]; ``routing`` of one's own [T, k] replaces the router's."""
        return moe_feed_forward(
            x,
            self.router.weight,
            self.gate_up_proj,
            self.down_proj,
            config=self.bundle,
            router_bias=self.router.bias,
            score_correction_bias=self.score_correction_bias,
            gate_up_proj_bias=self.gate_up_proj_bias,
            down_proj_bias=self.down_proj_bias,
            shared_gate_up_proj=self.shared_gate_up_proj,
            shared_down_proj=self.shared_down_proj,
            shared_gate=self.shared_gate,
            routing=routing,
        )

    def explain(self) -> MoEExplanation:
        """Which implementation computes the layer where its weights are now, and why not another."""
        weights = self.gate_up_proj
        bundle = self.bundle
        if weights.dtype != self.config.input_dtype:
            config = self.config.model_copy(update={"input_dtype": weights.dtype})
            bundle = bundle.model_copy(update={"config": config})
        return registry.explain(bundle, weights.device)

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}, "
            f"num_experts={c.num_experts}, top_k={c.top_k}, activation={c.activation!r}"
        )
