"""What the native kernels of the layer compute, in differentiable torch: a reference and second derivatives.

Letters as in docs/moe.md, P = T k places in expert order. ``Places`` says where the slots stand: slot
s = t k + j at place ``inverse[s]``, and at place p slot ``permutation[p]``. ``ends[e]`` is the cumulative end
of expert e, so the slots that are dropped stand from ``ends[-1]`` on; they count as zeros here, whatever
their weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..ops import sort_by_group

SILU, GELU, GELU_TANH, RELU, CLAMPED = range(5)
_TINY = 1e-20


class Places(NamedTuple):
    """All int32: permutation [P], inverse [P], ends [E]; and k."""

    permutation: torch.Tensor
    inverse: torch.Tensor
    ends: torch.Tensor
    k: int

    def live(self) -> torch.Tensor:
        """[P], whether a slot stands at a place of an expert."""
        return torch.arange(self.permutation.shape[0], device=self.ends.device) < self.ends[-1]


class Activation(NamedTuple):
    """How h becomes the input of the second product; in the order of the operators' arguments."""

    kind: int
    gated: bool
    interleaved: bool
    """Whether gates and ups alternate in the columns of h, instead of all gates coming first."""
    alpha: float
    limit: float


class Scores(NamedTuple):
    """How weights come from logits; in the order of the operators' arguments."""

    sigmoid: bool
    renormalize: bool
    scale: float


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def order(experts: torch.Tensor, num_experts: int) -> Places:
    """experts [T, k] -> where each slot stands."""
    found = sort_by_group(experts.reshape(-1), num_experts)
    ends = found.group_sizes.cumsum(0).to(torch.int32)
    return Places(
        found.permutation.to(torch.int32), found.inverse.to(torch.int32), ends, int(experts.shape[1])
    )


def spread(x: torch.Tensor, places: Places) -> torch.Tensor:
    """x [T, H] -> rows [P, H]: each token at the places of its slots."""
    rows = x.index_select(0, places.permutation // places.k)
    return torch.where(places.live().unsqueeze(1), rows, 0)


def to_places(values: torch.Tensor, places: Places) -> torch.Tensor:
    """values [T, k] of the slots -> [P, 1] at their places, zeros where slots are dropped."""
    return torch.where(places.live(), values.reshape(-1).index_select(0, places.permutation), 0).unsqueeze(1)


def to_slots(values: torch.Tensor, places: Places) -> torch.Tensor:
    """values [P] at the places -> [T, k] of the slots, zeros where they are dropped."""
    return torch.where(places.live(), values, 0).index_select(0, places.inverse).view(-1, places.k)


def collect(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    other: torch.Tensor | None,
    places: Places,
    dtype: torch.dtype,
) -> torch.Tensor:
    """rows [P, H] -> [T, H]: the sum over a token's slots, weighted by [T, k], plus ``other`` [T, H]."""
    width, kind = rows.shape[1], wide(rows.dtype)
    terms = torch.where(places.live().unsqueeze(1), rows, 0).to(kind)
    if weights is not None:
        terms = terms * to_places(weights, places)
    terms = terms.index_select(0, places.inverse).view(-1, places.k, width)
    total = terms[:, 0]
    for j in range(1, places.k):
        total = total + terms[:, j]
    return (total if other is None else total + other.to(kind)).to(dtype)


def collect_backward(
    gy: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """The derivatives of ``collect`` along rows and weights, from gy [T, H]."""
    g = spread(gy, places).to(wide(rows.dtype))
    dots = (g * rows).sum(-1)
    return (g * to_places(weights, places)).to(rows.dtype), to_slots(dots, places)


class Act(NamedTuple):
    """An activation's value and its slopes along gate and up."""

    value: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None


def _curve(g: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of one variable, and its slope."""
    if kind == SILU:
        s = torch.sigmoid(g)
        return g * s, s * (1 + g * (1 - s))
    if kind == GELU:
        area = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        return g * area, area + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    if kind == GELU_TANH:
        factor, cube = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(factor * (g + cube * g * g * g))
        slope = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * factor * (1 + 3 * cube * g * g)
        return 0.5 * g * (1 + t), slope
    return torch.relu(g), (g > 0).to(g.dtype)


def act(h: torch.Tensor, how: Activation) -> Act:
    """h [P, 2 I or I] -> value and slopes [P, I]."""
    if not how.gated:
        value, slope = _curve(h, how.kind)
        return Act(value, slope, None)
    gate, up = (h[:, ::2], h[:, 1::2]) if how.interleaved else h.chunk(2, dim=1)
    if how.kind == CLAMPED:
        g, u = gate.clamp(max=how.limit), up.clamp(min=-how.limit, max=how.limit) + 1
        s = torch.sigmoid(how.alpha * g)
        slope = torch.where(gate > how.limit, 0, u * s * (1 + how.alpha * g * (1 - s)))
        return Act(u * g * s, slope, torch.where(up.abs() > how.limit, 0, g * s))
    value, slope = _curve(gate, how.kind)
    return Act(value * up, slope * up, value)


def activate(h: torch.Tensor, weights: torch.Tensor | None, places: Places, how: Activation) -> torch.Tensor:
    """h [P, 2 I or I] -> [P, I], each row times its slot's weight."""
    value = act(h.to(wide(h.dtype)), how).value
    value = torch.where(places.live().unsqueeze(1), value, 0)
    return (value if weights is None else value * to_places(weights, places)).to(h.dtype)


def activate_backward(
    grad: torch.Tensor, h: torch.Tensor, weights: torch.Tensor | None, places: Places, how: Activation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The derivatives of ``activate`` along h and weights, from grad [P, I]."""
    kind = wide(h.dtype)
    a = act(h.to(kind), how)
    g = torch.where(places.live().unsqueeze(1), grad, 0).to(kind)
    scaled = g if weights is None else g * to_places(weights, places)
    grad_h = scaled * a.gate
    if a.up is not None:
        both = (grad_h, scaled * a.up)
        grad_h = torch.stack(both, -1).flatten(1) if how.interleaved else torch.cat(both, 1)
    return grad_h.to(h.dtype), None if weights is None else to_slots((g * a.value).sum(-1), places)


def route_backward(
    grad: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, how: Scores
) -> torch.Tensor:
    """The derivative of the weights along the logits [T, E], from grad and selected experts, both [T, k]."""
    values = logits.to(wide(logits.dtype))
    scores = values.sigmoid() if how.sigmoid else values.softmax(-1)
    s = scores.gather(-1, experts)
    slopes = grad
    if how.renormalize:
        total = s.sum(-1, keepdim=True) + _TINY
        slopes = (grad - (grad * (s / total)).sum(-1, keepdim=True)) / total
    slopes = slopes * how.scale
    dense = torch.zeros_like(scores).scatter(-1, experts, slopes)
    if how.sigmoid:
        return (scores * (1 - scores) * dense).to(logits.dtype)
    return (scores * (dense - (slopes * s).sum(-1, keepdim=True))).to(logits.dtype)
