"""The layer with its experts spread over the processes of a group.

Every process has tokens of its own, the router and the shared expert, and a block of the experts. A token's
rows travel to its experts' processes and back:

    sort the slots by expert -> all-to-all -> the experts of this process -> all-to-all back -> combine

Nothing is padded and no slot is dropped for want of room: each process receives what is routed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .._checks import _autocast_dtype
from .._errors import DTypeError, OptionError, ShapeError
from ..ops import GroupOrder, sort_by_group
from ._config import ConfigBundle, MoEConfig
from ._implementation import MoEImplementation
from ._layer import MoEFeedForward, check_routing, shared_expert
from ._permutation import combine, spread
from ._registry import registry
from ._routing import Routing
from ._transfer import Transfer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

SHARDED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
"""The parameters of which every process has the rows of its own experts."""


class _Part(NamedTuple):
    """Some of this process's tokens on their way."""

    routing: Routing
    order: GroupOrder
    transfer: Transfer
    token: torch.Tensor
    experts: torch.Tensor
    """[R] the experts of the rows that arrive, counted from this process's first."""


class ExpertParallelFeedForward(MoEFeedForward):
    """``MoEFeedForward`` with its experts spread over a process group.

    The parameters are those of ``MoEFeedForward``, of which ``gate_up_proj``, ``down_proj`` and their biases
    have the rows of this process's experts only: ``experts``, a range. Process r of P has the experts from
    r E // P up to (r + 1) E // P, so E need not be a multiple of P.

    Result and gradients of the tokens are those of one process that has all experts. Gradients of the experts
    are sums over the tokens of all processes; those of the router and of the shared expert are of this
    process's tokens, until ``reduce_replicated_gradients`` adds them up. There are derivatives of any order.

    Every process of the group has to call ``forward``, and ``backward`` where another does, even without a
    token. The numbers of rows are read back from the device once in each call, since the collective wants
    them on the host; so a call cannot be captured in a CUDA graph, and ``torch.compile`` leaves it out.

    Args:
        config: as in ``MoEFeedForward``.
        group: a process group, a one-dimensional ``DeviceMesh`` such as ``mesh["ep"]``, or None: the default
            group.
        chunks: the tokens go in that many parts, so that the rows of one travel while the experts compute
            another. With a shared expert, that is computed while the first rows travel in any case.
        implementation, device: as in ``MoEFeedForward``.

    Raises:
        OptionError: no process group, a mesh of several dimensions, fewer experts than processes, or
            ``chunks`` below 1.
    """

    _outside: ClassVar[Callable[..., torch.Tensor] | None] = None
    """``_forward``, which torch.compile leaves alone."""

    def __init__(
        self,
        config: MoEConfig | ConfigBundle,
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        chunks: int = 1,
        implementation: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        found, c = _group(group), config._bundle(implementation).config
        rank, size = dist.get_rank(found), dist.get_world_size(found)
        if c.num_experts < size:
            raise OptionError(
                f"expert_parallel: every process needs an expert; there are {c.num_experts} experts and "
                f"{size} processes in the group."
            )
        if chunks < 1:
            raise OptionError(f"expert_parallel: chunks must be 1 or more, got {chunks}.")
        bounds = [r * c.num_experts // size for r in range(size + 1)]
        mine = range(bounds[rank], bounds[rank + 1])
        super().__init__(config, implementation=implementation, device=device, _experts=len(mine))
        self.group, self.chunks, self.experts = found, chunks, mine
        self._counts = [b - a for a, b in pairwise(bounds)]
        # A row that arrives has one expert and the weight one: its own weight is at home, and applied there.
        alone = {"num_experts": len(mine), "top_k": 1, "num_expert_groups": 1, "top_k_groups": 1}
        local = c.model_copy(update={**alone, "output_dtype": None})
        self._local = self.bundle.model_copy(update={"config": local})
        if ExpertParallelFeedForward._outside is None:  # here, as it imports the compiler
            ExpertParallelFeedForward._outside = staticmethod(torch.compiler.disable(_forward))

    def forward(self, x: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        """x [..., H] -> [..., H]: this process's tokens; ``routing`` of one's own [T, k] has experts of all
        processes, 0 .. E - 1, and -1 for a dropped slot."""
        y: torch.Tensor = self._outside(self, x, routing)  # type: ignore[misc]
        return y

    def _dispatch(self, tokens: torch.Tensor, routing: Routing) -> list[_Part]:
        """Launch the exchanges of all parts. The one place that waits for the device."""
        c, ranks = self.config, len(self._counts)
        pieces = zip(*(t.tensor_split(self.chunks) for t in (tokens, *routing[:2])), strict=True)
        sources = [(x, Routing(e, w), sort_by_group(e.reshape(-1), c.num_experts)) for x, e, w in pieces]
        sizes = torch.stack([order.group_sizes for _, _, order in sources], dim=1)
        coming = sizes.new_empty((ranks * len(self.experts), self.chunks))
        received = [len(self.experts)] * ranks
        dist.all_to_all_single(coming, sizes, received, self._counts, group=self.group)
        ends = [0, *accumulate(self._counts)]
        going = torch.stack([sizes[a:b].sum(0) for a, b in pairwise(ends)])
        coming = coming.view(ranks, len(self.experts), self.chunks)
        splits = torch.stack([going, coming.sum(1)]).tolist()
        local = torch.arange(len(self.experts), device=tokens.device).repeat(ranks)
        parts = []
        for i, (x, own, order) in enumerate(sources):
            sent, arrive = ([row[i] for row in rows] for rows in splits)
            transfer = Transfer(sent, arrive, self.group)
            token = transfer.launch(spread(x, order, c.top_k)[: sum(sent)])
            experts = local.repeat_interleave(coming[:, :, i].reshape(-1), output_size=sum(arrive))
            parts.append(_Part(own, order, transfer, token, experts))
        return parts

    def _compute(self, part: _Part, made: MoEImplementation) -> tuple[Transfer, torch.Tensor]:
        """Wait for the rows of a part, compute this process's experts, launch the way back."""
        rows = part.transfer.wait(part.token)
        weights = rows.new_ones((rows.shape[0], 1), dtype=torch.float32)
        routing = Routing(part.experts.unsqueeze(1), weights)
        y = made.experts(
            rows, routing, self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        )
        back = part.transfer.reverse()
        return back, back.launch(y)

    def _combine(self, part: _Part, back: Transfer, token: torch.Tensor) -> torch.Tensor:
        rows, slots = back.wait(token), part.routing.experts.numel()
        if rows.shape[0] < slots:  # dropped slots were not sent; their places are past the others
            rows = F.pad(rows, (0, 0, 0, slots - rows.shape[0]))
        experts = part.routing.experts
        kept = (experts >= 0) & (experts < self.config.num_experts)
        weights = part.routing.weights.masked_fill(~kept, 0)
        return combine(rows, weights, part.order, self.config.output_dtype or rows.dtype)

    def shard(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of the state dict of a ``MoEFeedForward`` with all experts, what this process loads."""
        own = slice(self.experts.start, self.experts.stop)
        return {n: t[own] if n in SHARDED else t for n, t in state.items()}

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters that every process has: those of the router and of the shared expert."""
        return [p for n, p in self.named_parameters() if n not in SHARDED]

    def reduce_replicated_gradients(self) -> None:
        """Add up, over the processes, the gradients of what every process has; once after ``backward``.

        A gradient that is None counts as zeros, unless all are None here, as they have to be everywhere then.
        """
        parameters = [p for p in self.replicated_parameters() if p.requires_grad]
        if all(p.grad is None for p in parameters):
            return
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=self.group)

    def extra_repr(self) -> str:
        size = len(self._counts)
        return f"{super().extra_repr()}, experts={self.experts}, processes={size}, chunks={self.chunks}"


def _forward(layer: ExpertParallelFeedForward, x: torch.Tensor, routing: Routing | None) -> torch.Tensor:
    c = layer.config
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"moe: x must be a torch.Tensor [..., {c.hidden_size}], got {type(x).__name__}.")
    if x.dim() < 1 or x.shape[-1] != c.hidden_size:
        raise ShapeError(f"moe: x must have shape [..., {c.hidden_size}], got {list(x.shape)}.")
    dtype = _autocast_dtype(x)
    if _autocast_dtype(layer.gate_up_proj) != dtype:
        raise DTypeError(
            f"moe: gate_up_proj must have the dtype of x, {x.dtype}, got {layer.gate_up_proj.dtype}; "
            "convert one."
        )
    tokens = x.reshape(-1, c.hidden_size)
    if routing is None:
        routing = layer.route(tokens)
    else:
        check_routing(routing, tokens.shape[0], c, x)
    made: MoEImplementation = getattr(registry.instances, layer._local._key(None, str(x.device), dtype))
    parts = layer._dispatch(tokens.to(dtype), routing)
    shared = None
    if layer.shared_gate_up_proj is not None and layer.shared_down_proj is not None:
        shared = shared_expert(
            tokens, layer.shared_gate_up_proj, layer.shared_down_proj, layer.shared_gate, c
        )
    returning = [layer._compute(part, made) for part in parts]
    done = [layer._combine(part, *back) for part, back in zip(parts, returning, strict=True)]
    y = done[0] if len(done) == 1 else torch.cat(done)
    if shared is not None:
        y = y + shared.to(y.dtype)
    return y.view(x.shape)


def expert_parallel(
    layer: MoEFeedForward, group: ProcessGroup | DeviceMesh | None = None, *, chunks: int = 1
) -> ExpertParallelFeedForward:
    """Spread the experts of a layer over the processes of a group.

    Args:
        layer: with all experts and the same weights in every process. It is left as it is.
        group, chunks: as ``ExpertParallelFeedForward`` has them.

    Returns:
        The layer that has this process's experts, with copies of the weights, on their device and in their
        dtype. To make one without ever having all experts in a process, construct
        ``ExpertParallelFeedForward`` and load weights into it.
    """
    like = layer.gate_up_proj
    made = ExpertParallelFeedForward(layer.bundle, group, chunks=chunks, device=like.device)
    own = made.shard(dict(layer.named_parameters()))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.data = own[name].detach().clone()
            parameter.requires_grad_(own[name].requires_grad)
    if layer.score_correction_bias is not None:
        made.score_correction_bias = layer.score_correction_bias.detach().clone()
    return made.train(layer.training)


def _group(given: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            "expert_parallel: torch.distributed is not initialised; start the processes with torchrun and "
            "call torch.distributed.init_process_group first."
        )
    if given is None:
        default: ProcessGroup = dist.distributed_c10d._get_default_group()
        return default
    if isinstance(given, dist.ProcessGroup):
        return given
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(given, DeviceMesh):
        raise OptionError(
            f"expert_parallel: group must be a process group or a DeviceMesh, got {type(given).__name__}."
        )
    if given.ndim != 1:
        raise OptionError(
            f"expert_parallel: the mesh must have one dimension, got {given.ndim}; name one, such as "
            'mesh["ep"].'
        )
    return given.get_group()
