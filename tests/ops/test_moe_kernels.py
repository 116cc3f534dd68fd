"""The operators around the products of a layer, against torch in float64, at sizes that fill nothing."""

from __future__ import annotations

import pytest
import torch
from oracle import ROUNDOFF

pytest.importorskip("pydantic")

import moe_oracle
from moe_operands import KINDS, close, places_of, random

from multigemm.moe import MoEConfig, _composed, route
from multigemm.moe._composed import Places, Scores
from multigemm.moe._native import NativeMoE, activation_of

pytestmark = pytest.mark.usefixtures("backend")
ops = torch.ops.multigemm
SIZES = [(0, 3), (1, 1), (3, 2), (64, 16), (65, 3), (700, 5)]
"""Tokens and slots of each: one launch up to 64 tokens and 1024 slots, else two."""
WIDTHS = [(0, 3, 7), (1, 1, 1), (3, 2, 1100), (64, 16, 8), (65, 3, 1104), (200, 5, 13)]
"""Tokens, slots and columns, in packs of 16 bytes and not, in one piece and in several."""


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("experts", [1, 2, 33, 1024])
@pytest.mark.parametrize(("tokens", "k"), SIZES)
def test_order(tokens: int, k: int, experts: int, kind: torch.dtype, device: torch.device) -> None:
    found = torch.randint(
        -2, experts + 2, (tokens, k), dtype=kind, generator=torch.Generator().manual_seed(1)
    )
    expected = _composed.order(found, experts)
    for ours, theirs in zip(ops.moe_order(found.to(device), experts), expected, strict=False):
        assert ours.dtype == torch.int32 and torch.equal(ours.cpu(), theirs)


ROUTERS = {
    "softmax": {},
    "as it comes": {"renormalize": False, "routed_scaling_factor": 16.0},
    "sigmoid": {"score_function": "sigmoid", "score_correction_bias": True},
    "best groups": {"num_expert_groups": 4, "top_k_groups": 2, "group_score": "max"},
    "sums of two": {
        "num_expert_groups": 4, "top_k_groups": 3, "score_function": "sigmoid", "score_correction_bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("experts", [16, 40, 132, 260, 1024])
@pytest.mark.parametrize("variant", ROUTERS)
def test_router(variant: str, experts: int, dtype: torch.dtype, device: torch.device) -> None:
    """Selection, weights and gradient, where no rounding decides."""
    settings = {
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_experts": experts,
        "top_k": 6,
        **ROUTERS[variant],
    }
    config = MoEConfig(**settings)
    for tokens in (0, 1, 67):
        turns = torch.rand(tokens, experts).argsort(-1)
        logits = (4 - (1 + turns).log2()).to(dtype)  # the largest are far apart in any dtype
        bias = torch.linspace(0, 1e-3, experts) if config.score_correction_bias else None
        logits = logits[_clear(logits, bias, config)]
        assert len(logits) >= tokens // 2
        ours = logits.clone().to(device).requires_grad_()
        theirs = logits.clone().double().requires_grad_()
        routing, places = NativeMoE(config)._route(ours, None if bias is None else bias.to(device))
        expected = route(theirs, config, bias)
        wide = routing.weights.dtype
        assert wide == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(routing.experts.cpu(), expected.experts)
        close(routing.weights, expected.weights, wide, 64)
        order = _composed.order(expected.experts, experts)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(places[:3], order[:3], strict=True))
        g = random(len(logits), 6, device=torch.device("cpu"))
        routing.weights.backward(g.to(device, wide))
        expected.weights.backward(g)
        close(ours.grad, theirs.grad, dtype, 64)


def _clear(logits: torch.Tensor, bias: torch.Tensor | None, config: MoEConfig) -> torch.Tensor:
    """[T], whether the experts and groups to take are so far from the next that no rounding decides."""
    scores = logits.double().sigmoid() if config.score_function == "sigmoid" else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias
    apart = torch.ones(len(logits), dtype=torch.bool)
    if config.num_expert_groups > 1 and len(logits):
        grouped = choice.unflatten(1, (config.num_expert_groups, -1))
        highest = grouped.sort(-1, descending=True).values
        best = highest[..., :2].sum(-1) if config.group_score == "top2_sum" else highest[..., 0]
        ordered = best.sort(-1, descending=True)
        apart = ordered.values[:, config.top_k_groups - 1] - ordered.values[:, config.top_k_groups] > 1e-5
        barred = ordered.indices[:, config.top_k_groups :]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter(1, barred, True)
        choice = grouped.masked_fill(mask.unsqueeze(-1), 0).flatten(1)
    top = choice.sort(-1, descending=True).values[:, : config.top_k + 1]
    return apart & (top.diff().abs() > 1e-5).all(-1)


def test_equal_scores_take_the_first(device: torch.device) -> None:
    config = MoEConfig(hidden_size=1, intermediate_size=1, num_experts=40, top_k=16)
    logits = torch.zeros(70, 40, device=device)
    logits[:, 35] = 1
    found = NativeMoE(config).route(logits).experts
    assert found.tolist() == [[35, *range(15)]] * 70


def test_the_router_takes_any_strides_and_numbers(device: torch.device) -> None:
    """A transposed operand; infinities, and NaN, which is above all numbers as in torch.topk."""
    config = MoEConfig(hidden_size=1, intermediate_size=1, num_experts=8, top_k=3, score_function="sigmoid")
    logits = torch.stack([torch.randperm(8) for _ in range(9)]).double() - 4
    logits[2, 5], logits[3, 1], logits[4, 7] = float("inf"), float("-inf"), float("nan")
    expected = moe_oracle.route(logits[:2], config.model_dump())[0]
    found = NativeMoE(config).route(logits.T.contiguous().T.to(device)).experts.cpu()
    assert found[:2].tolist() == expected and found[2, 0] == 5 and 1 not in found[3] and found[4, 0] == 7


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize(("tokens", "k", "width"), WIDTHS)
def test_gather_and_combine(
    tokens: int, k: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    places = places_of(tokens, k, 9, device)
    x = random(tokens, width, device=device, dtype=dtype).requires_grad_()
    rows = ops.moe_spread(x, *places)
    exact = x.detach().double().requires_grad_()
    expected = _composed.spread(exact, places)
    assert torch.equal(rows.double(), expected)
    g = random(tokens * k, width, device=device, dtype=dtype)
    rows.backward(g)
    expected.backward(g.double())
    close(x.grad, exact.grad, dtype)

    wide = _composed.wide(dtype)
    for weighted in (False, True):
        for other in (None, random(tokens, width, device=device, dtype=dtype).requires_grad_()):
            weights = random(tokens, k, device=device, dtype=wide)
            dead = ~places.live()[places.inverse.long()].view(tokens, k)
            weights = weights.masked_fill(dead, float("nan")).requires_grad_() if weighted else None
            a = g.clone().requires_grad_()
            inputs = [t for t in (a, weights, other) if t is not None]
            doubles = [
                None if t is None else t.detach().double().requires_grad_() for t in (a, weights, other)
            ]
            for out in (dtype, wide):
                y = ops.moe_collect(a, weights, other, *places, out)
                expected = _composed.collect(*doubles, places, torch.float64)
                close(y, expected, dtype)
                gy = random(tokens, width, device=device, dtype=out)
                ours = torch.autograd.grad(y, inputs, gy)
                theirs = torch.autograd.grad(expected, [t for t in doubles if t is not None], gy.double())
                for of, mine, exact in zip(inputs, ours, theirs, strict=True):
                    close(mine, exact, wide if of is weights else dtype, 8 + width)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("width", [13, 1032])
@pytest.mark.parametrize("kind", KINDS)
def test_activation(kind: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
    how = KINDS[kind]
    for tokens, k in ((0, 3), (1, 1), (41, 3)):
        places = places_of(tokens, k, 9, device)
        h = random(tokens * k, width * (2 if how.gated else 1), device=device, dtype=dtype).requires_grad_()
        dead = ~places.live()[places.inverse.long()].view(tokens, k)
        grad = random(tokens * k, width, device=device, dtype=dtype)
        for weighted in (False, True):
            weights = random(tokens, k, device=device, dtype=_composed.wide(dtype))
            weights = weights.masked_fill(dead, float("inf")).requires_grad_() if weighted else None
            a = ops.moe_activate(h, weights, *places, *how)
            exact, w = h.detach().double().requires_grad_(), None
            if weights is not None:
                w = weights.detach().double().requires_grad_()
            expected = _composed.activate(exact, w, places, how)
            close(a, expected, dtype)
            inputs = [h] if weights is None else [h, weights]
            ours = torch.autograd.grad(a, inputs, grad)
            theirs = torch.autograd.grad(expected, [exact] if w is None else [exact, w], grad.double())
            for of, mine, other in zip(inputs, ours, theirs, strict=True):
                close(mine, other, _composed.wide(dtype) if of is weights else dtype, 8 + width)


def test_activation_of_the_configuration(device: torch.device) -> None:
    """The layer's composition of torch operators is the same function."""
    from multigemm.moe._activation import activate

    places = Places(*ops.moe_order(torch.zeros(6, 1, dtype=torch.int64, device=device), 1), 1)
    for activation in ("swiglu", "geglu", "reglu", "clamped_swiglu", "silu", "gelu", "relu"):
        for tanh in ("none", "tanh"):
            config = MoEConfig(
                hidden_size=1, intermediate_size=5, num_experts=1, top_k=1, activation=activation,
                gelu_approximate=tanh, clamp_limit=0.5,
            )  # fmt: skip
            h = random(6, config.up_width, device=device)
            close(
                ops.moe_activate(h, None, *places, *activation_of(config)),
                activate(h, config),
                torch.float64,
                64,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_of_the_activation(kind: str, device: torch.device) -> None:
    how, places = KINDS[kind], places_of(4, 2, 5, device)
    h = random(8, 3 * (2 if how.gated else 1), device=device).requires_grad_()
    weights = random(4, 2, device=device).requires_grad_()

    def f(h: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ops.moe_activate(h, weights, *places, *how)
        return result

    assert torch.autograd.gradcheck(f, (h, weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (h, weights), fast_mode=True)


def test_second_derivatives_of_the_rest(device: torch.device) -> None:
    places = places_of(4, 2, 5, device)
    x, weights = random(4, 3, device=device).requires_grad_(), random(4, 2, device=device).requires_grad_()
    rows, logits = random(8, 3, device=device).requires_grad_(), random(4, 8, device=device).requires_grad_()

    def combine(rows: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ops.moe_collect(rows, weights, x, *places, torch.float64)
        return result

    def gather(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ops.moe_spread(x, *places)
        return result

    for function, operands in ((combine, (rows, weights, x)), (gather, (x,))):
        assert torch.autograd.gradcheck(function, operands, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, operands, fast_mode=True)
    for how in (Scores(False, True, 2.0), Scores(False, False, 1.0), Scores(True, True, 1.0)):

        def router(logits: torch.Tensor, how: Scores = how) -> torch.Tensor:
            result: torch.Tensor = ops.moe_route(logits, None, 3, *how, 1, 1, False)[1]
            return result

        assert torch.autograd.gradcheck(router, (logits,), fast_mode=True)
        assert torch.autograd.gradgradcheck(router, (logits,), fast_mode=True)


def test_inference_is_what_training_computes(device: torch.device) -> None:
    from moe_kit import SMALL, VARIANTS, make, tokens

    for variant in ("swiglu", "gpt-oss", "deepseek-v3"):
        layer = make({**SMALL, **VARIANTS[variant]}, "multigemm_native_moe", device)
        for count in (0, 1, 64, 65, 200):
            x = tokens(count, device)
            with torch.no_grad():
                found = layer(x)
            close(found, layer(x), found.dtype)  # whose rows are weighed earlier
