"""Cases of expert parallelism: each process compares its share with one layer that has all experts.

Every process makes the same layer and the tokens of all processes, so that it can compute the whole by
itself. A case is a function of the process's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_kit import SMALL, VARIANTS
from moe_kit import make as make_on
from torch.distributed.device_mesh import init_device_mesh

from multigemm import errors
from multigemm.moe import (
    ExpertParallelFeedForward,
    MoEConfig,
    MoEFeedForward,
    Routing,
    expert_parallel,
    registry,
)
from multigemm.moe import _expert_parallel as parallel

Case = Callable[[torch.device], None]
CASES: dict[str, Case] = {}
COUNTS = (5, 0, 7, 2)
"""Tokens of each process, for up to four of them; one has none."""
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def make(
    settings: dict[str, Any], name: str | None, device: torch.device, dtype: torch.dtype = torch.float64
) -> MoEFeedForward:
    """The same weights in every process, whatever its device draws."""
    return make_on(settings, name, torch.device("cpu"), dtype).to(device)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def share(
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    counts: tuple[int, ...] = COUNTS,
    group: Any = None,
) -> tuple[torch.Tensor, slice]:
    """The tokens of all processes of the group, and which of them are this process's."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    start = sum(counts[:rank])
    x = torch.randn(sum(counts[:world]), 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return x.to(device, dtype), slice(start, start + counts[rank])


def agree(ours: torch.Tensor, theirs: torch.Tensor, what: str = "") -> None:
    bound = LIMIT[theirs.dtype] * max(theirs.abs().max().item() if theirs.numel() else 0.0, 1e-3)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    error = (ours - theirs).abs().max().item() if ours.numel() else 0.0
    assert error <= bound, f"{what}: {error:.2e} above {bound:.2e}"


def agree_in_gradients(layer: ExpertParallelFeedForward, whole: MoEFeedForward) -> None:
    layer.reduce_replicated_gradients()
    own = dict(layer.named_parameters())
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for key, gradient in layer.shard(expected).items():
        found = own[key].grad
        assert found is not None, key
        agree(found, gradient, key)


def compare(
    settings: dict[str, Any],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float64,
    counts: tuple[int, ...] = COUNTS,
    routing: Routing | None = None,
    group: Any = None,
    name: str | None = None,
    **options: Any,
) -> ExpertParallelFeedForward:
    """Values and all gradients, also of a routing of one's own."""
    whole = make(settings, name, device, dtype)
    layer = expert_parallel(whole, group, **options)
    members = layer.group
    x, mine = share(device, dtype, counts, members)
    inputs = [x] if routing is None else [x, routing.weights]
    all_inputs = [t.detach().clone().requires_grad_() for t in inputs]
    own_inputs = [t[mine].detach().clone().requires_grad_() for t in inputs]
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(device)

    def call(made: MoEFeedForward, given: list[torch.Tensor], rows: slice) -> torch.Tensor:
        own = None if routing is None else Routing(routing.experts[rows], given[1])
        y = made(given[0], own)
        y.backward(g[rows].to(y.dtype))
        return y.detach()

    theirs = call(whole, all_inputs, slice(None))
    ours = call(layer, own_inputs, mine)
    agree(ours, theirs[mine], "values")
    for own, everything in zip(own_inputs, all_inputs, strict=True):
        assert everything.grad is not None and own.grad is not None
        agree(own.grad, everything.grad[mine], "inputs")
    agree_in_gradients(layer, whole)
    return layer


@case
def every_kind_of_layer(device: torch.device) -> None:
    for variant in ("swiglu", "gpt-oss", "bias, plain", "deepseek-v3", "qwen2-moe", "top 1"):
        compare({**SMALL, **VARIANTS[variant]}, device)


@case
def each_implementation(device: torch.device) -> None:
    """That takes the layer there: native ones need a backend."""
    for name in registry.names():
        for variant in ("gpt-oss", "interleaved", "qwen2-moe"):
            settings = {**SMALL, **VARIANTS[variant]}
            if registry.supports_config(name, MoEConfig(**settings), device):
                layer = compare(settings, device, name=name, chunks=2)
                assert layer.explain().implementation == name


@case
def chunks(device: torch.device) -> None:
    """More of them than tokens too."""
    for number in (2, 3, 9):
        compare({**SMALL, **VARIANTS["deepseek-v3"]}, device, chunks=number)


@case
def experts_that_do_not_divide_evenly(device: torch.device) -> None:
    layer = compare({**SMALL, "num_experts": 7}, device)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, layer.experts)
    assert [e for part in shares for e in part] == list(range(7))
    assert layer.gate_up_proj.shape[0] == len(layer.experts)


@case
def numbers_of_tokens(device: torch.device) -> None:
    for counts in ((0, 0, 0, 0), (0, 3, 0, 0), (9, 9, 9, 9), (1, 30, 2, 0)):
        for number in (1, 2):
            compare({**SMALL, "shared_intermediate_size": 3}, device, counts=counts, chunks=number)


def own_routing(device: torch.device, experts: torch.Tensor) -> Routing:
    weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return Routing(experts.to(device), weights.to(device))


@case
def routings_of_ones_own(device: torch.device) -> None:
    """All to one process, some dropped, all dropped."""
    total = sum(COUNTS[: dist.get_world_size()])
    some = torch.randint(-1, 9, (total, 3), generator=torch.Generator().manual_seed(3))
    for experts in (
        torch.zeros(total, 3).long(),
        torch.full((total, 3), 7),
        some,
        torch.full((total, 3), -1),
    ):
        for number in (1, 2):
            settings = {**SMALL, "expert_bias": True}
            compare(settings, device, routing=own_routing(device, experts), chunks=number)


@case
def dropped_slots_add_exact_zeros(device: torch.device) -> None:
    x, mine = share(device)
    layer = expert_parallel(make(SMALL, None, device))
    x = x[mine].fill_(float("nan")).requires_grad_()
    weights = torch.full((x.shape[0], 3), float("inf"), dtype=torch.float64, device=device)
    y = layer(x, Routing(torch.full(weights.shape, -1, device=device), weights))
    y.sum().backward()
    assert x.grad is not None and not y.any() and not x.grad.any()
    assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


def random_routing(device: torch.device) -> Routing:
    """For narrow dtypes, since a rounded logit may select another expert."""
    total = sum(COUNTS[: dist.get_world_size()])
    routing = own_routing(device, torch.randint(0, 8, (total, 3), generator=torch.Generator().manual_seed(3)))
    return Routing(routing.experts, routing.weights.float())


@case
def narrow_dtypes(device: torch.device) -> None:
    routing = random_routing(device)
    for dtype in (torch.float32, torch.bfloat16):
        compare({**SMALL, "output_dtype": torch.float32}, device, dtype=dtype, routing=routing)
    compare({**SMALL, "shared_intermediate_size": 3}, device, dtype=torch.float32, routing=routing, chunks=2)


@case
def autocast(device: torch.device) -> None:
    routing = random_routing(device)
    whole = make(SMALL, None, device, torch.float32)
    layer = expert_parallel(whole)
    x, mine = share(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        ours = layer(x[mine], Routing(routing.experts[mine], routing.weights[mine]))
        theirs = whole(x, routing)
    assert ours.dtype == torch.bfloat16
    agree(ours, theirs[mine])
    ours.float().sum().backward()
    assert layer.down_proj.grad is not None and layer.down_proj.grad.dtype == torch.float32


@case
def second_derivatives(device: torch.device) -> None:
    for settings, number in (
        (SMALL, 1),
        ({**SMALL, **VARIANTS["gpt-oss"]}, 2),
        ({**SMALL, "recompute": True}, 1),
    ):
        whole = make(settings, None, device)
        layer = expert_parallel(whole, chunks=number)
        x, mine = share(device)
        inputs = [x.clone().requires_grad_(), x[mine].clone().requires_grad_()]
        for made, leaf in zip((whole, layer), inputs, strict=True):
            (force,) = torch.autograd.grad(made(leaf).square().sum(), leaf, create_graph=True)
            force.square().sum().backward()
        assert inputs[0].grad is not None and inputs[1].grad is not None
        agree(inputs[1].grad, inputs[0].grad[mine], "inputs")
        agree_in_gradients(layer, whole)


@case
def backward_twice_and_in_part(device: torch.device) -> None:
    layer = expert_parallel(make(SMALL, None, device), chunks=2)
    x, mine = share(device)
    own = x[mine].requires_grad_()
    y = layer(own)
    first = torch.autograd.grad(y.square().sum(), (own, layer.down_proj), retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), (own, layer.down_proj), retain_graph=True)
    (weights,) = torch.autograd.grad(y.square().sum(), layer.down_proj)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(weights, first[1])


@case
def the_same_call_gives_the_same_bits(device: torch.device) -> None:
    layer = expert_parallel(
        make({**SMALL, "shared_intermediate_size": 4}, None, device, torch.float32), chunks=2
    )
    x, mine = share(device, torch.float32, (40, 60, 0, 33))
    own = x[mine].requires_grad_()

    def once() -> list[torch.Tensor]:
        layer.zero_grad()
        own.grad = None
        y = layer(own)
        y.square().sum().backward()
        assert own.grad is not None
        gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        return [y.detach(), own.grad.clone(), *gradients]

    first = once()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


@case
def inference(device: torch.device) -> None:
    whole = make({**SMALL, **VARIANTS["qwen2-moe"]}, None, device)
    layer = expert_parallel(whole, chunks=2)
    x, mine = share(device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            agree(layer(x[mine]), whole(x)[mine])
    agree(layer(x[mine].view(1, -1, 6)).view(-1, 6).detach(), whole(x)[mine].detach())


@case
def training(device: torch.device) -> None:
    """Steps of an optimizer stay those of one process."""
    whole = make({**SMALL, **VARIANTS["deepseek-v3"]}, None, device)
    layer = expert_parallel(whole)
    x, mine = share(device, counts=(12, 9, 0, 5))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (whole, layer)]
    for _ in range(5):
        for made, optimizer, rows in zip((whole, layer), optimizers, (x, x[mine]), strict=True):
            optimizer.zero_grad()
            ((made(rows) - rows.flip(1)).square().sum() / x.shape[0]).backward()
            if made is layer:
                layer.reduce_replicated_gradients()
            optimizer.step()
    for key, value in layer.shard(whole.state_dict()).items():
        torch.testing.assert_close(layer.state_dict()[key], value, rtol=1e-9, atol=1e-9)


@case
def weights_are_loaded(device: torch.device) -> None:
    whole = make({**SMALL, **VARIANTS["deepseek-v3"]}, None, device)
    layer = ExpertParallelFeedForward(whole.config, device=device)
    layer.load_state_dict(layer.shard(whole.state_dict()))
    assert set(layer.state_dict()) == set(whole.state_dict())
    x, mine = share(device)
    agree(layer(x[mine]).detach(), whole(x)[mine].detach())
    names = {n for n, _ in layer.named_parameters()}
    replicated = {
        n for n, p in layer.named_parameters() if any(p is q for q in layer.replicated_parameters())
    }
    assert names - replicated == {"gate_up_proj", "down_proj"}


@case
def meshes(device: torch.device) -> None:
    """Groups of two beside each other where there are four processes, each with tokens of its own."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("data", "expert"))
    layer = compare(SMALL, device, group=mesh["expert"], counts=(4, 3))
    assert len(layer.experts) == 4 and "processes=2" in repr(layer)
    compare(SMALL, device, group=mesh["expert"].get_group(), counts=(0, 6), chunks=2)
    with pytest.raises(
        errors.OptionError, match=r'must have one dimension, got 2; name one, such as mesh\["ep"\]'
    ):
        ExpertParallelFeedForward(layer.config, mesh)


@case
def bad_calls(device: torch.device) -> None:
    """Refused before anything is sent, so that no process waits for another."""
    few = MoEConfig(hidden_size=6, intermediate_size=5, num_experts=1, top_k=1)
    with pytest.raises(errors.OptionError, match=r"there are 1 experts and \d processes"):
        ExpertParallelFeedForward(few)
    whole = make(SMALL, None, device)
    with pytest.raises(errors.OptionError, match="chunks must be 1 or more, got 0"):
        expert_parallel(whole, chunks=0)
    with pytest.raises(errors.OptionError, match="a process group or a DeviceMesh, got str"):
        expert_parallel(whole, "ep")  # type: ignore[arg-type]
    layer = expert_parallel(whole)
    x, _ = share(device)
    with pytest.raises(errors.ShapeError, match=r"x must have shape \[\.\.\., 6\]"):
        layer(x[:, :5])
    with pytest.raises(errors.DTypeError, match=r"gate_up_proj must have the dtype of x, torch\.float32"):
        layer(x.float())
    with pytest.raises(errors.ShapeError, match=r"routing.experts must have shape"):
        layer(
            x, Routing(torch.zeros(1, 3, dtype=torch.int64, device=device), torch.zeros(1, 3, device=device))
        )


@case
def rows_travel_while_others_are_computed(device: torch.device) -> None:
    """In the forward and in the backward pass, by the order of launches and waits."""
    events: list[str] = []
    start, finish, shared = parallel.Transfer.start, parallel.Transfer.finish, parallel.shared_expert

    def spy(name: str, function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            events.append(name)
            return function(*arguments)

        return run

    parallel.Transfer.start = spy("launch", start)  # type: ignore[method-assign]
    parallel.Transfer.finish = spy("wait", finish)  # type: ignore[method-assign]
    parallel.shared_expert = spy("shared", shared)
    try:
        layer = expert_parallel(make({**SMALL, "shared_intermediate_size": 3}, None, device), chunks=2)
        x, mine = share(device)
        y = layer(x[mine].requires_grad_())
        assert events == ["launch", "launch", "shared", "wait", "launch", "wait", "launch", "wait", "wait"]
        events.clear()
        y.sum().backward()
        assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]
    finally:
        parallel.Transfer.start, parallel.Transfer.finish = start, finish  # type: ignore[method-assign]
        parallel.shared_expert = shared
