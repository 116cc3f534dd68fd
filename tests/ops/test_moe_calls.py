"""The mixture-of-experts layer as a module, under transforms and modes, and bad calls of it."""

from __future__ import annotations

import copy
from typing import Any

import moe_oracle
import pytest
import torch

pytest.importorskip("pydantic")

from moe_kit import NAMES, SMALL, VARIANTS, close, make, skip_unless_there, tensors, tokens

from multigemm import errors
from multigemm.moe import MoEConfig, MoEFeedForward, Routing, moe_feed_forward, registry, route


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, device: torch.device) -> str:
    skip_unless_there(request.param, device)
    return str(request.param)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        ("swiglu", "aot_eager"),
        ("deepseek-v3", "aot_eager"),
        ("gpt-oss", "inductor"),
        ("recompute", "aot_eager"),
    ],
)
def test_compile(variant: str, backend: str, name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    layer = make({**SMALL, **VARIANTS[variant]}, name, device)
    x = tokens(7, device).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    operands = (x, *layer.parameters())
    ours = torch.autograd.grad(compiled(x).square().sum(), operands)
    theirs = torch.autograd.grad(layer(x).square().sum(), operands)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("variant", ["gpt-oss", "deepseek-v3"])
def test_torch_func(variant: str, name: str, device: torch.device) -> None:
    layer = make({**SMALL, **VARIANTS[variant]}, name, device)
    x = tokens(3, device)
    jacobian = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), jacobian)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return layer(x).square().sum()

    leaf = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(force.square().sum(), leaf)
    ours = torch.func.grad(lambda x: torch.func.grad(energy)(x).square().sum())(x)
    torch.testing.assert_close(ours, second)


def test_compile_of_the_function_and_of_two_layers(device: torch.device) -> None:
    torch._dynamo.reset()
    first, second = make(SMALL, None, device), make({**SMALL, "top_k": 2}, "pytorch_multi_gemm_moe", device)
    x = tokens(7, device)
    both = torch.nn.Sequential(first, second)
    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))
    call = torch.compile(moe_feed_forward, fullgraph=True, backend="aot_eager")
    arguments = (x, first.router.weight, first.gate_up_proj, first.down_proj)
    torch.testing.assert_close(call(*arguments, config=first.config), first(x))


def test_compile_takes_another_number_of_tokens(device: torch.device) -> None:
    torch._dynamo.reset()
    layer = make(SMALL, None, device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (7, 12, 3):
        torch.testing.assert_close(compiled(tokens(count, device)), layer(tokens(count, device)))


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast(recompute: bool, name: str, device: torch.device) -> None:
    """Weights in float32, products in bfloat16, gradients in float32."""
    settings = {**SMALL, "shared_intermediate_size": 4, "recompute": recompute}
    layer = make(settings, name, device, torch.float32)
    x = tokens(9, device, torch.float32).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        routing = layer.route(x)
        y = layer(x)
    assert y.dtype == torch.bfloat16 and routing.weights.dtype == torch.float32
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    w = tensors(layer)
    expected = moe_oracle.feed_forward(
        x.detach().cpu().double(),
        w,
        settings,
        routing.experts.tolist(),
        routing.weights.detach().cpu().double(),
    )
    close(y, expected, torch.bfloat16, 16)


def test_fake_and_meta(name: str, device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = make(SMALL, name, torch.device("meta"))
    assert layer(torch.empty(4, 6, dtype=torch.float64, device="meta")).shape == (4, 6)
    with FakeTensorMode():
        layer = MoEFeedForward(MoEConfig(**SMALL), implementation=name, device=device)
        layer(torch.empty(4, 6, device=device, requires_grad=True)).sum().backward()
        assert layer.down_proj.grad.shape == (8, 5, 6)


# --- the module, and bad calls --------------------------------------------------------------------


def test_state(device: torch.device) -> None:
    """Exactly the weights are in the state dict, and the layer follows ``to`` and copies."""
    layer = make({**SMALL, **VARIANTS["deepseek-v3"]}, None, device, torch.float32)
    names = {
        "router.weight", "gate_up_proj", "down_proj", "score_correction_bias", "shared_gate_up_proj",
        "shared_down_proj",
    }  # fmt: skip
    assert set(layer.state_dict()) == names
    other = MoEFeedForward(layer.config, device=device)
    other.load_state_dict(layer.state_dict())
    x = tokens(5, device, torch.float32)
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.explain().implementation in registry.names() and "top_k=3" in repr(layer)
    assert other.score_correction_bias.dtype == torch.float32


X = torch.zeros(4, 6, dtype=torch.float64)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": ({"x": X[:, :5]}, errors.ShapeError, r"x must have shape \[\.\.\., 6\], got \[4, 5\]"),
    "kind": ({"x": None}, errors.DTypeError, "x must be a torch.Tensor"),
    "dtype": ({"x": X.float()}, errors.DTypeError, "gate_up_proj must have the dtype of x, torch.float32"),
    "device": ({"x": X.to("meta")}, errors.DeviceError, "router_weight must be on the device of x, meta"),
    "w": ({"down_proj": X}, errors.ShapeError, r"down_proj must have shape \[8, 5, 6\], got \[4, 6\]"),
    "bias": ({"down_proj_bias": X}, errors.OptionError, "down_proj_bias was given"),
    "router": ({"router_weight": None}, errors.OptionError, r"router_weight \[8, 6\] is missing"),
    "correction": (
        {"score_correction_bias": X[0]}, errors.OptionError, "score_correction_bias has to be given exactly",
    ),
    "routing": (
        {"routing": Routing(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2))},
        errors.ShapeError, r"routing.experts must have shape \[4, 3\], got \[4, 2\]",
    ),
    "routing's dtype": (
        {"routing": Routing(torch.zeros(4, 3), torch.zeros(4, 3))}, errors.DTypeError, "integer experts",
    ),
    "implementation": ({"implementation": "fast"}, errors.OptionError, "there is no implementation 'fast'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_calls(case: str) -> None:
    changes, kind, sentence = BAD[case]
    layer = make(SMALL, None, torch.device("cpu"))
    arguments = {
        "x": X,
        "router_weight": layer.router.weight,
        "gate_up_proj": layer.gate_up_proj,
        "down_proj": layer.down_proj,
        "config": layer.config,
        **changes,
    }
    with pytest.raises(kind, match=sentence):
        moe_feed_forward(**arguments)


def test_bad_calls_of_route() -> None:
    config = MoEConfig(**SMALL, score_correction_bias=True)
    with pytest.raises(errors.ShapeError, match=r"logits must have shape \[T, 8\], got \[2, 7\]"):
        route(torch.zeros(2, 7), config, torch.zeros(8))
    with pytest.raises(errors.ShapeError, match=r"score_correction_bias must have shape \[8\]"):
        route(torch.zeros(2, 8), config, torch.zeros(7))
    with pytest.raises(errors.OptionError, match="got none"):
        route(torch.zeros(2, 8), config)


def test_scores_that_vanish_give_zeros() -> None:
    """Sigmoids of logits far below zero are all zero; their sum must not make NaN of the weights."""
    config = MoEConfig(**SMALL, score_function="sigmoid")
    assert torch.equal(route(torch.full((2, 8), -1e4), config).weights, torch.zeros(2, 3))
