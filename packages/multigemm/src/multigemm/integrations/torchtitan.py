"""torchtitan: ``GroupedExperts``.

    from multigemm.integrations import torchtitan as adapter
    adapter.convert(model)          # the experts of a model of torchtitan, in place

or ``GroupedExperts`` of this module wherever one of torchtitan 0.2 is constructed: constructor, parameters,
state dict and values are the same. It needs no torchtitan; tokens need no padding to a multiple of eight.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..compat import grouped_mm as torch_grouped_mm
from ._grouped import sorted_experts

HOMES = ("torchtitan.models.moe.moe", "torchtitan.models.common.moe")
"""Where torchtitan has its own, up to 0.2 and from 0.3 on."""


class GroupedExperts(nn.Module):
    """The experts of a torchtitan layer, w2(silu(w1 x) * w3 x), on multigemm's grouped products.

    Args:
        dim: D, width of the tokens.
        hidden_dim: F, width inside an expert.
        num_experts: E.
        use_grouped_mm: torchtitan's own computes in bfloat16 where it is True, and in the tokens' dtype
            where it is False; so does this one. Both are grouped products here.

    Parameters: ``w1`` and ``w3`` [E, F, D], ``w2`` [E, D, F], left to ``init_weights`` or to a checkpoint.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = True) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.use_grouped_mm = use_grouped_mm

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """x [N, D] in expert order, counts [E] -> [N, D]; rows past the last expert's are zeros."""
        return _forward(self, x, num_tokens_per_expert)

    def init_weights(self, init_std: float) -> None:
        """Normal within -2 .. 2, of standard deviation 0.02 for w1 and ``init_std`` for w2 and w3."""
        for parameter, std in ((self.w1, 0.02), (self.w2, init_std), (self.w3, init_std)):
            nn.init.trunc_normal_(parameter, std=std)


def convert(model: nn.Module) -> int:
    """Let every ``GroupedExperts`` of torchtitan in a model compute with multigemm, in place.

    The modules stay what and where they are, with parameters, hooks and parallelism; they are of a subclass
    afterwards. Returns their number.
    """
    homes = [sys.modules[name] for name in HOMES if name in sys.modules]
    theirs = tuple(home.GroupedExperts for home in homes)
    found = [m for m in model.modules() if type(m) in theirs]
    for module in found:
        module.__class__ = _subclass(type(module))
    return len(found)


def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """torchtitan's class with its products replaced: by the method that is there for it, or the whole."""
    if hasattr(kind, "_grouped_mm"):
        return type("GroupedExperts", (kind,), {"_grouped_mm": _product})
    return type("GroupedExperts", (kind,), {"forward": _forward})


def _product(self: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch_grouped_mm(A, B_t, offs=offs)


def _forward(self: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
    dtype = torch.bfloat16 if self.use_grouped_mm else x.dtype
    return sorted_experts(x, (self.w1, self.w2, self.w3), num_tokens_per_expert, _gate, dtype)


def _gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up
