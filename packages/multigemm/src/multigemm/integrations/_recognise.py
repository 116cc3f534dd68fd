"""Which of ``MoEConfig``'s activations the experts of a transformers model have.

Names of classes and of attributes change from version to version, and two models' gates may differ by a
clamp. So the module is asked: its gate is evaluated once on numbers of every magnitude, and it is one of
ours where every value agrees in float64. What agrees with none stays the module's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..moe import MoEConfig
from ..moe._activation import activate

Fields = tuple[tuple[str, Any], ...]

_known: weakref.WeakKeyDictionary[Any, dict[Any, Fields | None]] = weakref.WeakKeyDictionary()


def recognise(module: Any) -> Fields | None:
    """The fields of ``MoEConfig`` that describe the module's activation, or None."""
    state = vars(module)
    scalars = tuple((k, v) for k, v in state.items() if isinstance(v, (bool, int, float, str)))
    key = (scalars, id(getattr(module, "act_fn", None)))
    answers = _known.setdefault(module, {})
    if key not in answers:
        answers[key] = _ask(module)
    return answers[key]


def _ask(module: Any) -> Fields | None:
    with _disable_current_modes(), torch.no_grad():  # the numbers are real ones, also while a graph is traced
        h = _numbers()
        try:
            theirs = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        except Exception:
            return None  # a gate with parameters on another device, say, is not one of ours
        if not isinstance(theirs, torch.Tensor) or theirs.dtype != h.dtype:
            return None
        return next((fields for fields in _candidates(module) if _agrees(h, theirs, fields)), None)


def _agrees(h: torch.Tensor, theirs: torch.Tensor, fields: Fields) -> bool:
    config = MoEConfig(hidden_size=1, intermediate_size=1, num_experts=1, top_k=1, **dict(fields))
    ours, size = activate(h, config), 1 + h.abs()
    if config.gated:
        size = activate(size, config.model_copy(update={"activation": "reglu"}))
    return ours.shape == theirs.shape and bool(((ours - theirs).abs() <= 1e-12 * size).all())


def _numbers() -> torch.Tensor:
    """[N, 4]: pairs of numbers of either sign from 1e-6 to 1e30, so that no clamp is missed."""
    fine = torch.linspace(-30, 30, 121, dtype=torch.float64, device="cpu")
    coarse = torch.logspace(-6, 30, 37, dtype=torch.float64, device="cpu")
    line = torch.cat([fine, coarse, -coarse])
    pairs = torch.cartesian_prod(line, line)
    return torch.cat([pairs, pairs.roll(7919, 0)], dim=1)


def _candidates(module: Any) -> Iterator[Fields]:
    if not module.has_gate:
        yield (("activation", "silu"),)
        yield (("activation", "relu"),)
        for form in ("none", "tanh"):
            yield ("activation", "gelu"), ("gelu_approximate", form)
        return
    for layout in ("concatenated", "interleaved"):
        order = ("gate_up_layout", layout)
        yield ("activation", "swiglu"), order
        yield ("activation", "reglu"), order
        for form in ("none", "tanh"):
            yield ("activation", "geglu"), order, ("gelu_approximate", form)
        for prefix in ("", "swiglu_"):
            alpha, limit = getattr(module, f"{prefix}alpha", None), getattr(module, f"{prefix}limit", None)
            if isinstance(alpha, float) and isinstance(limit, (int, float)) and limit > 0:
                clamp = ("clamp_alpha", alpha), ("clamp_limit", float(limit))
                yield ("activation", "clamped_swiglu"), order, *clamp
