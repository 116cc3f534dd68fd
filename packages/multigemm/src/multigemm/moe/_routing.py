"""The router: from logits to the experts of each token and their weights.

    s = softmax(l) or sigmoid(l)                          scores, over all experts
    S(t) = the k experts of the largest s[t] + b          b: the correction bias, zero without one
    p[t, e] = c * s[t, e] / sum of s[t] over S(t)         e in S(t); no division unless renormalised

Grouped top-k selects among the experts of the best groups only. Softmax and grouped top-k by a group's best
score are DeepSeek-V2's (arXiv:2405.04434, section 2.2), sigmoid, correction bias and the sum of a group's
two best DeepSeek-V3's (arXiv:2412.19437, section 2.1.2). A softmax over the k selected logits, as Mixtral
(arXiv:2401.04088) and gpt-oss have it, is the same as a softmax over all that is renormalised.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._errors import OptionError, ShapeError
from ._config import MoEConfig

_TINY = 1e-20  # keeps a sum of sigmoids that are all zero from giving NaN; far below one rounding otherwise


class Routing(NamedTuple):
    """The experts of each token. One's own may have slots that are dropped: expert -1."""

    experts: torch.Tensor
    """[T, k] integers; an expert outside 0 .. E - 1 drops its slot."""
    weights: torch.Tensor
    """[T, k] floating point."""
    logits: torch.Tensor | None = None
    """[T, E], for a balancing loss; None where the routing came from elsewhere."""


def route(
    logits: torch.Tensor, config: MoEConfig, score_correction_bias: torch.Tensor | None = None
) -> Routing:
    """Select the experts of each token and weigh them.

    Args:
        logits: [T, E], floating point.
        config: score function, grouping, renormalisation and scaling.
        score_correction_bias: [E]; needed where ``config.score_correction_bias``, and only there. It
            takes part in the selection alone and gets no gradient.

    Returns:
        ``Routing(experts [T, k] int64, weights [T, k], logits)``; weights are float64 where the logits are,
        float32 otherwise, and differentiable in the logits to any order.

    Raises:
        ShapeError, OptionError: logits or bias that do not fit the configuration.
    """
    check(logits, config, score_correction_bias)
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    scores = wide.softmax(-1) if config.score_function == "softmax" else wide.sigmoid()
    choice = scores.detach()
    if score_correction_bias is not None:
        choice = choice + score_correction_bias.detach()
    if config.num_expert_groups > 1:
        choice = _within_best_groups(choice, config)
    experts = choice.topk(config.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    if config.routed_scaling_factor != 1.0:
        weights = weights * config.routed_scaling_factor
    return Routing(experts, weights, logits)


def check(logits: torch.Tensor, config: MoEConfig, score_correction_bias: torch.Tensor | None) -> None:
    """Raises what ``route`` does."""
    if logits.dim() != 2 or logits.shape[1] != config.num_experts:
        raise ShapeError(
            f"route: logits must have shape [T, {config.num_experts}], got {list(logits.shape)}."
        )
    if (score_correction_bias is not None) != config.score_correction_bias:
        given = "none" if score_correction_bias is None else "one"
        raise OptionError(
            f"route: score_correction_bias has to be given exactly where the configuration says so "
            f"(score_correction_bias={config.score_correction_bias}), got {given}."
        )
    if score_correction_bias is not None and tuple(score_correction_bias.shape) != (config.num_experts,):
        raise ShapeError(
            f"route: score_correction_bias must have shape [{config.num_experts}], "
            f"got {list(score_correction_bias.shape)}."
        )


def _within_best_groups(choice: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """choice [T, E] with minus infinity at the experts of all but the best groups."""
    tokens, count = choice.shape[0], config.num_expert_groups
    grouped = choice.view(tokens, count, config.num_experts // count)
    best = grouped.topk(2, dim=-1).values.sum(-1) if config.group_score == "top2_sum" else grouped.amax(-1)
    groups = best.topk(config.top_k_groups, dim=-1, sorted=False).indices
    barred = torch.ones_like(best, dtype=torch.bool).scatter(1, groups, False)
    return grouped.masked_fill(barred.unsqueeze(-1), float("-inf")).view(tokens, config.num_experts)
