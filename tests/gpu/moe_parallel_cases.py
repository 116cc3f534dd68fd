"""The cases of expert parallelism for GPUs: those of any device, and what only a GPU can get wrong."""

from __future__ import annotations

from typing import Any

import moe_parallel
import torch
import torch.distributed as dist
from moe_parallel import CASES as SHARED
from moe_parallel import Case, agree, make, share

from multigemm.moe import MoEConfig, MoEFeedForward, Routing, expert_parallel

CASES: dict[str, Case] = dict(SHARED)
LARGE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 384, "num_experts": 16, "top_k": 4,
    "shared_intermediate_size": 256,
}  # fmt: skip


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def large(device: torch.device, dtype: torch.dtype) -> tuple[MoEFeedForward, torch.Tensor, slice, Routing]:
    """A layer, the tokens of all processes and their routing, as skewed as it gets without being trivial."""
    torch.manual_seed(0)
    layer = MoEFeedForward(MoEConfig(**LARGE, input_dtype=dtype)).to(device)
    counts = (3000, 1100, 2048, 1)[: dist.get_world_size()]
    start = sum(counts[: dist.get_rank()])
    x = torch.randn(sum(counts), LARGE["hidden_size"]).to(device, dtype)
    experts = (16 * torch.rand(sum(counts), 4) ** 3).long().to(device)
    weights = torch.rand(sum(counts), 4).to(device)
    return layer, x, slice(start, start + counts[dist.get_rank()]), Routing(experts, weights)


def once(layer: Any, x: torch.Tensor, routing: Routing) -> list[torch.Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, routing)
    (y.float() * torch.linspace(-1, 1, y.shape[1], device=y.device)).sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, layer.gate_up_proj.grad.clone(), layer.down_proj.grad.clone()]


def own(routing: Routing, mine: slice) -> Routing:
    return Routing(routing.experts[mine], routing.weights[mine])


@case
def thousands_of_tokens(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole, x, mine, routing = large(device, dtype)
        y, gx, *weights = once(whole, x, routing)
        for chunks in (1, 2, 5):
            layer = expert_parallel(whole, chunks=chunks)
            part = slice(layer.experts.start, layer.experts.stop)
            expected = [y[mine], gx[mine], *(w[part] for w in weights)]
            for ours, theirs in zip(once(layer, x[mine], own(routing, mine)), expected, strict=True):
                agree(ours, theirs, f"{dtype}, {chunks} chunks")


@case
def memory_is_not_reused_while_rows_travel(device: torch.device) -> None:
    """The same bits again and again, with NaN in whatever memory is free in between."""
    whole, x, mine, routing = large(device, torch.bfloat16)
    layer = expert_parallel(whole, chunks=4)
    first = once(layer, x[mine], own(routing, mine))
    for _ in range(10):
        for size in (2**22, 2**16, 2**12):
            blocks = [torch.full((size,), float("nan"), device=device) for _ in range(8)]
            del blocks
        found = once(layer, x[mine], own(routing, mine))
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


@case
def on_a_stream_of_ones_own(device: torch.device) -> None:
    whole, x, mine, routing = large(device, torch.float32)
    layer = expert_parallel(whole, chunks=2)
    expected = once(layer, x[mine], own(routing, mine))
    ready = x[mine].clone()
    late = torch.zeros_like(ready)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(ready)
        found = once(layer, late, own(routing, mine))
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@case
def another_device_than_the_current_one(device: torch.device) -> None:
    """The process's device is that of its tensors."""
    layer = expert_parallel(make(moe_parallel.SMALL, None, device))
    x, mine = share(device)
    expected = layer(x[mine]).detach()
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    with torch.cuda.device(other):
        found = layer(x[mine]).detach()
        assert torch.cuda.current_device() == other.index
    assert found.device == device and torch.equal(found, expected)
