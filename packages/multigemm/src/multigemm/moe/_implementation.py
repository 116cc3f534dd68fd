"""The interface of an implementation: one way to compute the layer."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from .._errors import OptionError
from . import _routing
from ._config import MoEConfig
from ._routing import Routing


class Support(NamedTuple):
    """Whether an implementation computes a configuration; true or false as a condition."""

    supported: bool
    reason: str = ""
    """Why not; empty where it is supported."""

    def __bool__(self) -> bool:
        return self.supported


class Options(BaseModel):
    """The options of an implementation: none here, a subclass adds fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MoEImplementation(abc.ABC):
    """One way to compute the layer, made for one configuration.

    Subclass it, give ``name``, and register it: ``registry.register(Mine)``, or an entry point of the group
    ``multigemm.moe_implementations`` whose name is the implementation's and whose value is the class.
    It holds no tensors: the layer has the weights and passes them to each call.
    """

    name: ClassVar[str] = ""
    options_type: ClassVar[type[Options]] = Options
    """What ``ConfigBundle.implementation_config`` is read as."""

    def __init__(self, config: MoEConfig, implementation_config: Mapping[str, Any] | None = None) -> None:
        """Raises ``OptionError`` where ``implementation_config`` is not what ``options_type`` allows."""
        self.config = config
        try:
            self.options = self.options_type.model_validate(dict(implementation_config or {}))
        except ValidationError as error:
            allowed = ", ".join(self.options_type.model_fields) or "none"
            raise OptionError(
                f"{self.name}: implementation_config {dict(implementation_config or {})!r} does not fit; "
                f"options of this implementation: {allowed}. {error}"
            ) from error

    @classmethod
    @abc.abstractmethod
    def supports_config(cls, config: MoEConfig, device: torch.device) -> Support:
        """Whether this implementation computes ``config`` on ``device``, and why not."""

    def route(self, logits: torch.Tensor, score_correction_bias: torch.Tensor | None = None) -> Routing:
        """Select experts and weigh them: logits [T, E] -> experts [T, k], weights [T, k]."""
        return _routing.route(logits, self.config, score_correction_bias)

    @abc.abstractmethod
    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        gate_up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``y[t] = sum over j of weights[t, j] * expert(experts[t, j])(x[t])``.

        x [T, H], routing of [T, k], gate_up_proj [E, H, 2 I] or [E, H, I], down_proj [E, I, H], biases
        [E, 2 I] or [E, I], and [E, H] -> [T, H] of ``config.output_dtype``. A slot whose expert is outside
        0 .. E - 1 adds exact zeros to y and to every gradient.
        """

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
        """``route``, then ``experts``: for implementations that can do both better at once."""
        routing = self.route(logits, score_correction_bias)
        return self.experts(x, routing, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
