"""The mixture-of-experts layer: values and derivatives of every implementation, against float64."""

from __future__ import annotations

import copy

import moe_oracle
import pytest
import torch
from oracle import ROUNDOFF

pytest.importorskip("pydantic")

from moe_kit import NAMES, SMALL, VARIANTS, close, make, skip_unless_there, tensors, tokens

from multigemm.moe import Routing


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, device: torch.device) -> str:
    skip_unless_there(request.param, device)
    return str(request.param)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(variant: str, name: str, device: torch.device) -> None:
    settings = {**SMALL, **VARIANTS[variant]}
    layer = make(settings, name, device)
    x = tokens(7, device).requires_grad_()
    y = layer(x)
    w, x64 = tensors(layer, grad=True), x.detach().cpu().requires_grad_()
    expected = moe_oracle.feed_forward(x64, w, settings)
    close(y, expected, torch.float64)
    g = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y.backward(g.to(device))
    expected.backward(g)
    close(x.grad, x64.grad, torch.float64, 512)
    for key, parameter in layer.named_parameters():
        other = w[key].grad
        close(parameter.grad, torch.zeros_like(w[key]) if other is None else other, torch.float64, 512)


@pytest.mark.parametrize("k", range(1, 17))
def test_every_top_k(k: int, device: torch.device) -> None:
    settings = {**SMALL, "num_experts": 17, "top_k": k}
    layer = make(settings, None, device)
    x = tokens(5, device)
    close(layer(x), moe_oracle.feed_forward(x.cpu(), tensors(layer), settings), torch.float64)


@pytest.mark.parametrize("out", [None, torch.float32])
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_dtypes(dtype: torch.dtype, out: torch.dtype | None, name: str, device: torch.device) -> None:
    """With a routing of one's own, because a rounded logit may select another expert."""
    settings = {**SMALL, "expert_bias": True, "shared_intermediate_size": 4, "output_dtype": out}
    layer = make(settings, name, device, dtype)
    x = tokens(9, device, dtype)
    experts = torch.randint(-1, 8, (9, 3), generator=torch.Generator().manual_seed(3))
    weights = torch.rand(9, 3, generator=torch.Generator().manual_seed(4))
    y = layer(x, routing=Routing(experts.to(device), weights.to(device)))
    assert y.dtype == (out or dtype)
    w = tensors(layer)
    expected = moe_oracle.feed_forward(x.cpu().double(), w, settings, experts.tolist(), weights.double())
    narrow = max(dtype, out or dtype, key=lambda d: ROUNDOFF[d])
    close(y, expected, narrow, 16)


def test_router_dtype(device: torch.device) -> None:
    """Logits in float32 of tokens in bfloat16: the selection is that of the exact product."""
    settings = {**SMALL, "router_dtype": torch.float32}
    layer = make(settings, None, device, torch.bfloat16)
    x = tokens(20, device, torch.bfloat16)
    for autocast in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            found = layer.route(x)
        logits = x.cpu().double() @ layer.router.weight.detach().cpu().double().T
        experts, weights = moe_oracle.route(logits, settings)
        assert found.experts.tolist() == experts and found.weights.dtype == torch.float32
        close(found.weights, torch.tensor(weights), torch.float32)
        assert found.logits is not None and found.logits.dtype == torch.float32


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 6), (2, 0, 6)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], name: str, device: torch.device) -> None:
    layer = make(SMALL, name, device)
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    flat = layer(x.reshape(-1, 6))
    assert torch.equal(flat, y.reshape(-1, 6))


def test_rows_that_are_not_contiguous(name: str, device: torch.device) -> None:
    layer = make(SMALL, name, device)
    x = torch.randn(6, 4, 3, dtype=torch.float64, device=device).permute(2, 1, 0)
    assert torch.equal(layer(x), layer(x.contiguous()))
    mirrored = copy.deepcopy(layer)
    mirrored.down_proj = torch.nn.Parameter(layer.down_proj.detach().mT.contiguous().mT)
    torch.testing.assert_close(mirrored(x), layer(x))


@pytest.mark.parametrize("dropped", [-1, 8, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_dropped_slots_add_exact_zeros(dropped: int, bias: bool, name: str, device: torch.device) -> None:
    """To values and to every gradient, whatever stands in their weights and in their tokens."""
    layer = make({**SMALL, "expert_bias": bias, "activation": "clamped_swiglu"}, name, device)
    experts = torch.tensor([[0, dropped, 2], [dropped] * 3, [7, 3, dropped], [1, 2, 3]], device=device)
    gone = (experts < 0) | (experts >= 8)
    weights = torch.rand(4, 3, dtype=torch.float64, device=device)

    def run(bad: float, token: float) -> list[torch.Tensor]:
        layer.zero_grad()
        x = tokens(4, device)
        x[1] = token  # of the token that is dropped from all its slots
        x.requires_grad_()
        w = weights.masked_fill(gone, bad).requires_grad_()
        y = layer(x, routing=Routing(experts, w))
        y.square().sum().backward()
        routed = [p.grad for n, p in layer.named_parameters() if not n.startswith("router")]
        return [y.detach(), x.grad, w.grad, *routed]

    plain = run(0.0, 0.0)
    for bad, token in ((1.0, 1.0), (float("inf"), float("nan")), (float("nan"), float("inf"))):
        for ours, theirs in zip(run(bad, token), plain, strict=True):
            assert torch.equal(ours, theirs)
    y, gx, gw = plain[:3]
    assert not y[1].any() and not gx[1].any() and not gw[gone].any()
    assert gx[[0, 2, 3]].abs().sum(1).all()


def test_memory_is_never_read_before_it_is_written(poisoned: None, name: str, device: torch.device) -> None:
    layer = make({**SMALL, "expert_bias": True}, name, device)
    x = tokens(4, device).requires_grad_()
    experts = torch.full((4, 3), -1, device=device)
    experts[0, 1] = 5
    y = layer(x, routing=Routing(experts, torch.rand(4, 3, dtype=torch.float64, device=device)))
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and not y[1:].any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert not layer.gate_up_proj.grad[:5].any() and layer.gate_up_proj.grad[5].any()


@pytest.mark.parametrize(
    "variant", ["swiglu", "gpt-oss", "deepseek-v3", "qwen2-moe", "recompute", "as it comes"]
)
def test_second_derivatives(variant: str, name: str, device: torch.device) -> None:
    settings = {**SMALL, "hidden_size": 3, "intermediate_size": 2, "num_experts": 4, "top_k": 2}
    settings.update(VARIANTS[variant])
    if "num_expert_groups" in settings:
        settings.update(num_expert_groups=2, top_k_groups=1)
    layer = make(settings, name, device)
    names = [n for n, _ in layer.named_parameters()]
    x = torch.randn(3, 3, dtype=torch.float64, device=device, requires_grad=True)

    def f(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    operands = (x, *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    # Along random directions: in every direction at once, each case takes twenty seconds.
    torch.manual_seed(6)
    assert torch.autograd.gradcheck(f, operands, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, operands, fast_mode=True)


def test_recompute_gives_the_same_bits_and_keeps_less(name: str, device: torch.device) -> None:
    kept, results = {}, {}
    for recompute in (False, True):
        layer = make({**SMALL, "recompute": recompute}, name, device)
        x = tokens(32, device).requires_grad_()
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if t.is_floating_point():
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x)
        kept[recompute] = sum(sizes.values())
        y.square().sum().backward()
        results[recompute] = [y, x.grad, *(p.grad for p in layer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(results[False], results[True], strict=True))
    # Without it both halves [96, 10] stay too; and the gathered tokens [96, 6] and the hidden rows' parts,
    # unless kernels make them again in any case.
    assert kept[True] + 96 * (10 if "native" in name else 6 + 10) * 8 <= kept[False]


def test_the_same_call_gives_the_same_bits(name: str, device: torch.device) -> None:
    layer = make({**SMALL, "shared_intermediate_size": 4}, name, device, torch.float32)
    x = tokens(200, device, torch.float32).requires_grad_()

    def run() -> list[torch.Tensor]:
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in layer.parameters())]

    first = [t.clone() for t in run()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_a_tokens_result_does_not_depend_on_its_company(device: torch.device) -> None:
    """Its k terms are added in the order of its slots, wherever its rows are."""
    layer = make({**SMALL, "top_k": 8}, "pytorch_multi_gemm_moe", device)
    x = tokens(12, device)
    turn = torch.randperm(12, generator=torch.Generator().manual_seed(5)).to(device)
    torch.testing.assert_close(layer(x)[turn], layer(x[turn]), rtol=1e-13, atol=1e-13)


def test_router_and_experts_train(device: torch.device) -> None:
    layer = make(SMALL, None, device)
    x, target = tokens(40, device), tokens(40, device).flip(0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
