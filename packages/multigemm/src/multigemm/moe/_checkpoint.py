"""Weights of a layer from the layouts that checkpoints have.

They differ in names, in whether gate and up are one tensor (and then one after the other, or in turn), in
whether an expert's tensor is [out, in] or transposed, and in whether the experts are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .._errors import OptionError, ShapeError
from ._config import MoEConfig


@dataclass(frozen=True)
class CheckpointLayout:
    """The names of a layer's tensors in a checkpoint, and how they lie. None is what the layout lacks.

    A name with ``{e}`` stands for one tensor of each expert, without it for all experts stacked. The first
    projection is ``gate_up``, or ``gate`` and ``up`` apart; a plain activation has ``up`` or ``gate_up``.
    """

    down: str
    gate_up: str | None = None
    gate: str | None = None
    up: str | None = None
    gate_up_bias: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    """Whether an expert's weight is [in, out]; False is [out, in], as in ``torch.nn.Linear``."""
    interleaved: bool = False
    """Whether the outputs of ``gate_up`` are gate and up in turn; False is all of gate, then all of up."""
    router: str = "gate.weight"
    router_bias: str | None = None
    score_correction_bias: str | None = None
    shared: tuple[str, str, str] | None = None
    """Gate, up and down of the shared expert, each [out, in]."""
    shared_gate: str | None = None


def _linear(
    prefix: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[str, str, str]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return gate, up, down


_LISTS = CheckpointLayout(
    gate="experts.{e}.gate_proj.weight", up="experts.{e}.up_proj.weight", down="experts.{e}.down_proj.weight"
)

LAYOUTS = {
    "mixtral": CheckpointLayout(
        gate="experts.{e}.w1.weight", up="experts.{e}.w3.weight", down="experts.{e}.w2.weight"
    ),
    "qwen2-moe": replace(_LISTS, shared=_linear("shared_expert."), shared_gate="shared_expert_gate.weight"),
    "qwen3-moe": _LISTS,
    "deepseek": replace(
        _LISTS, shared=_linear("shared_experts."), score_correction_bias="gate.e_score_correction_bias"
    ),
    "gpt-oss": CheckpointLayout(
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        gate_up_bias="experts.gate_up_proj_bias",
        down_bias="experts.down_proj_bias",
        transposed=True,
        interleaved=True,
        router="router.weight",
        router_bias="router.bias",
    ),
    "llama4": CheckpointLayout(
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        transposed=True,
        router="router.weight",
        shared=_linear("shared_expert."),
    ),
    "transformers": CheckpointLayout(
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        shared=_linear("shared_experts."),
        score_correction_bias="gate.e_score_correction_bias",
    ),
    "torchtitan": CheckpointLayout(
        gate="experts.w1",
        up="experts.w3",
        down="experts.w2",
        router="router.gate.weight",
        score_correction_bias="expert_bias",
        shared=_linear("shared_experts.", ("w1", "w3", "w2")),
    ),
}
"""Layouts by name: "mixtral", "qwen2-moe", "qwen3-moe" and "deepseek" have lists of experts, as published;
"gpt-oss", "llama4", "transformers" (5, in memory) and "torchtitan" have them stacked."""


def read_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    config: MoEConfig,
    layout: str | CheckpointLayout,
    *,
    prefix: str = "",
    experts: range | None = None,
) -> dict[str, torch.Tensor]:
    """Take a layer's tensors out of a checkpoint: what ``MoEFeedForward(config).load_state_dict`` takes.

    Args:
        tensors: by name; other layers' may be among them.
        config: what the layer computes. Its ``gate_up_layout`` is that of the result.
        layout: one of ``LAYOUTS``, or one's own.
        prefix: what stands before the layer's names, such as "model.layers.3.mlp.".
        experts: those that are read, for ``ExpertParallelFeedForward.experts``; None is all.

    Returns:
        The state dict, in the checkpoint's dtypes: views where the layout allows it, else copies.

    Raises:
        OptionError: a layout that is not known, a tensor that is missing, or one that begins with ``prefix``
            and has no place in the configuration.
        ShapeError: a tensor that does not have the shape which the configuration gives it.
    """
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise OptionError(
                f"read_checkpoint: there is no layout {layout!r}; there are: {', '.join(LAYOUTS)}."
            )
        layout = LAYOUTS[layout]
    reader = _Reader(tensors, prefix, layout, config.num_experts, experts)
    c, e = config, config.num_experts
    h, i = c.hidden_size, c.intermediate_size
    state = {"router.weight": reader.plain("router", layout.router, (e, h))}
    if c.router_bias:
        state["router.bias"] = reader.plain("router_bias", layout.router_bias, (e,))
    if c.score_correction_bias:
        name = layout.score_correction_bias
        state["score_correction_bias"] = reader.plain("score_correction_bias", name, (e,)).float()
    state["gate_up_proj"] = _first(reader, config, bias=False)
    state["down_proj"] = reader.experts("down", layout.down, (i, h))
    if c.expert_bias:
        state["gate_up_proj_bias"] = _first(reader, config, bias=True)
        state["down_proj_bias"] = reader.experts("down_bias", layout.down_bias, (h,))
    if c.shared_intermediate_size:
        state.update(_shared(reader, config))
    reader.check_rest()
    return state


def _first(reader: _Reader, config: MoEConfig, bias: bool) -> torch.Tensor:
    """The first projection [E, H, W], or its bias [E, W], with its columns as the configuration has them."""
    names, suffix = reader.layout, "_bias" if bias else ""
    inputs = () if bias else (config.hidden_size,)
    fused, gate, up = (getattr(names, n + suffix) for n in ("gate_up", "gate", "up"))
    if not config.gated:
        return reader.experts(f"up{suffix}", up or fused, (*inputs, config.up_width))
    if fused is None:
        half = (*inputs, config.intermediate_size)
        return _join(
            reader.experts(f"gate{suffix}", gate, half), reader.experts(f"up{suffix}", up, half), config
        )
    both = reader.experts(f"gate_up{suffix}", fused, (*inputs, config.up_width))
    if names.interleaved == (config.gate_up_layout == "interleaved"):
        return both
    parts = (both[..., ::2], both[..., 1::2]) if names.interleaved else both.chunk(2, dim=-1)
    return _join(parts[0], parts[1], config)


def _shared(reader: _Reader, config: MoEConfig) -> dict[str, torch.Tensor]:
    h, s = config.hidden_size, config.shared_intermediate_size
    gate, up, down = reader.layout.shared or (None, None, None)
    first = reader.plain("shared", up, (s, h)).mT
    if config.gated:
        first = _join(reader.plain("shared", gate, (s, h)).mT, first, config)
    state = {"shared_gate_up_proj": first, "shared_down_proj": reader.plain("shared", down, (h, s)).mT}
    if config.shared_gate:
        state["shared_gate"] = reader.plain("shared_gate", reader.layout.shared_gate, (1, h)).mT
    return state


def _join(gate: torch.Tensor, up: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    if config.gate_up_layout == "interleaved":
        return torch.stack([gate, up], dim=-1).flatten(-2)
    return torch.cat([gate, up], dim=-1)


class _Reader:
    """The tensors of one layer, and which of them were read."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        prefix: str,
        layout: CheckpointLayout,
        count: int,
        experts: range | None,
    ) -> None:
        self.tensors, self.prefix, self.layout, self.count = tensors, prefix, layout, count
        self.wanted = range(count) if experts is None else experts
        self.read: set[str] = set()

    def plain(self, field: str, name: str | None, shape: tuple[int, ...]) -> torch.Tensor:
        if name is None:
            raise OptionError(f"read_checkpoint: the configuration needs {field}, and the layout has none.")
        full = self.prefix + name
        if full not in self.tensors:
            there = sorted(n for n in self.tensors if n.startswith(self.prefix))
            some = f"{', '.join(there[:8])}{' ...' if len(there) > 8 else ''}" if there else "none"
            raise OptionError(
                f"read_checkpoint: {full!r} is missing; names that begin with {self.prefix!r}: {some}."
            )
        self.read.add(full)
        found = self.tensors[full]
        if tuple(found.shape) != shape:
            hint = ""
            if len(shape) > 1 and tuple(found.mT.shape) == shape:
                hint = f" It has the one of a layout with transposed={not self.layout.transposed}."
            raise ShapeError(
                f"read_checkpoint: {full!r} must have shape {list(shape)}, got {list(found.shape)}.{hint}"
            )
        return found

    def experts(self, field: str, name: str | None, shape: tuple[int, ...]) -> torch.Tensor:
        """shape [in, out] or [out] of one expert -> [experts, *shape]."""
        flip = len(shape) == 2 and not self.layout.transposed
        stored = shape[::-1] if flip else shape
        if name is None or "{e}" not in name:
            found = self.plain(field, name, (self.count, *stored))[self.wanted.start : self.wanted.stop]
        else:
            found = torch.stack([self.plain(field, name.format(e=e), stored) for e in self.wanted])
            self.read.update(self.prefix + name.format(e=e) for e in range(self.count))
        return found.mT if flip else found

    def check_rest(self) -> None:
        rest = sorted(n for n in self.tensors if n.startswith(self.prefix) and n not in self.read)
        if rest:
            more = " ..." if len(rest) > 8 else ""
            raise OptionError(
                f"read_checkpoint: the configuration has no place for {', '.join(rest[:8])}{more}; "
                "give the prefix of the layer, or a configuration that has one."
            )
