"""Experts of transformers' models by name: logits and gradients equal to the models' own."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

import transformers
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from multigemm import errors
from multigemm.integrations import transformers as adapter
from multigemm.integrations._recognise import recognise
from multigemm.moe import MoEConfig, MoEFeedForward, read_checkpoint, registry, use

COMMON: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False,
    "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": (
        "MixtralConfig",
        {"intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 2}, "swiglu",
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 20, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3,
            "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        },
        "swiglu",
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "clamped_swiglu",
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "intermediate_size": 20, "moe_intermediate_size": 12, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
        },
        "swiglu",
    ),
    "gelu": (
        "MixtralConfig",
        {
            "intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 2,
            "hidden_act": "gelu_pytorch_tanh",
        },
        "geglu",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    assert adapter.register() == "multigemm"
    assert adapter.register("multigemm_native", implementation="multigemm_moe") == "multigemm_native"


def model(family: str, dtype: torch.dtype = torch.float64) -> Any:
    kind, changes, _ = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**COMMON, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
    return made.to(dtype).eval()


def experts_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "is_transposed")]


def outcome(model: Any, name: str, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.set_experts_implementation(name)
    model.zero_grad()
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    return result.logits.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", ["multigemm", "multigemm_native"])
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_gradients(family: str, name: str) -> None:
    made = model(family)
    found = [dict(recognise(m) or ()).get("activation") for m in experts_of(made)]
    assert found and set(found) == {MODELS[family][2]}
    tokens = torch.randint(1, 40, (2, 9))
    logits, grads = outcome(made, "eager", tokens)
    ours, our_grads = outcome(made, name, tokens)
    torch.testing.assert_close(ours, logits, rtol=1e-10, atol=1e-10)
    # Eager leaves experts without a token out of the graph, so a gradient may be absent instead of zero.
    assert set(grads) <= set(our_grads)
    for key, grad in our_grads.items():
        expected = grads.get(key, torch.zeros_like(grad))
        torch.testing.assert_close(
            grad, expected, rtol=1e-8, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_bfloat16(family: str) -> None:
    """As near to float64 as the model's own experts are, up to a factor; the routing is given, as a rounded
    logit may select another expert."""
    made = model(family, torch.bfloat16)
    experts = experts_of(made)[0]
    x = torch.randn(30, 24, dtype=torch.bfloat16)
    index = torch.randint(0, experts.num_experts, (30, 2))
    weights = torch.rand(30, 2)
    exact = copy.deepcopy(experts).double()
    results = {}
    for name in ("eager", "multigemm"):
        experts.config._experts_implementation = name
        results[name] = experts(x, index, weights)
        assert results[name].dtype == torch.bfloat16
    exact.config._experts_implementation = "eager"
    expected = exact(x.double(), index, weights.double())
    error = {name: (y.double() - expected).abs().max().item() for name, y in results.items()}
    assert error["multigemm"] <= 1.5 * error["eager"] < 0.1 * expected.abs().max().item()


def test_by_argument_and_saved(tmp_path: Any) -> None:
    """``from_config`` and ``from_pretrained`` take the name, and no weight is rearranged."""
    first = model("gpt-oss", torch.float32)
    first.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="multigemm", dtype=torch.float32
    ).eval()
    assert loaded.config._experts_implementation == "multigemm"
    tokens = torch.randint(1, 40, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, first(tokens).logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), first.parameters(), strict=True))


def test_generate() -> None:
    made = model("mixtral")
    tokens = torch.randint(1, 40, (1, 5))
    found = {}
    for name in ("eager", "multigemm"):
        made.set_experts_implementation(name)
        found[name] = made.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=True)
    assert torch.equal(found["eager"], found["multigemm"])


def test_the_layers_choice_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("mixtral")
    experts = experts_of(made)[0]
    calls: list[str] = []
    for name in registry.names():
        kind = registry.get(name)
        original = kind.experts

        def spy(self: Any, *a: Any, original: Any = original) -> torch.Tensor:
            calls.append(self.name)
            return original(self, *a)

        monkeypatch.setattr(kind, "experts", spy)
    arguments = torch.randn(3, 24).double(), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2).double()
    for name in ("multigemm", "multigemm_native"):
        experts.config._experts_implementation = name
        with use("pytorch_multi_gemm_moe"):
            experts(*arguments)
    assert calls[-1] == "multigemm_moe" and "pytorch_multi_gemm_moe" in calls
    with pytest.raises(errors.OptionError, match="there is no implementation 'fast'"):
        adapter.register("fast", implementation="fast")


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_experts_of_other_ranks_add_exact_zeros(family: str) -> None:
    """Expert parallelism of transformers marks them by the number of experts, with weight zero."""
    experts = experts_of(model(family))[0]
    x = torch.randn(6, 24, dtype=torch.float64)
    index = torch.tensor([[0, 1], [2, 9], [9, 9], [3, 0], [9, 1], [2, 3]]).clamp(max=experts.num_experts)
    weights = torch.rand(6, 2, dtype=torch.float64)
    gone = index == experts.num_experts
    weights = weights.masked_fill(gone, 0)
    experts._is_expert_parallel = True
    experts.config._experts_implementation = "batched_mm"
    expected = experts(x, index, weights)
    experts.config._experts_implementation = "multigemm"
    x[2] = float("nan")
    found = experts(x.requires_grad_(), index, weights)
    assert not found[2].any()
    kept = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found[kept], expected[kept])
    found.sum().backward()
    assert x.grad.isfinite().all() and not x.grad[2].any()


LAYERS = {
    "mixtral": ({"num_experts": 5, "top_k": 2, "intermediate_size": 20}, "mixtral", "block_sparse_moe."),
    "qwen3-moe": ({"num_experts": 6, "top_k": 3, "intermediate_size": 12}, "qwen3-moe", "mlp."),
    "gpt-oss": (
        {
            "num_experts": 4, "top_k": 2, "intermediate_size": 16, "activation": "clamped_swiglu",
            "expert_bias": True, "router_bias": True,
        },
        "gpt-oss", "mlp.",
    ),
    "deepseek-v3": (
        {
            "num_experts": 8, "top_k": 3, "intermediate_size": 12, "score_function": "sigmoid",
            "score_correction_bias": True, "num_expert_groups": 4, "top_k_groups": 2,
            "routed_scaling_factor": 2.5, "shared_intermediate_size": 12,
        },
        "deepseek", "mlp.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("family", LAYERS)
def test_the_layer_from_a_models_weights(family: str, saved: bool, tmp_path: Any) -> None:
    """Of its checkpoint, which has lists of experts, and of the model in memory, which has them stacked."""
    made = model(family, torch.float32)
    block, x = made.model.layers[1].mlp, torch.randn(3, 7, 24)
    changes, layout, name = LAYERS[family]
    if family == "deepseek-v3":
        with torch.no_grad():
            block.gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    if saved:
        from safetensors.torch import load_file

        made.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
    else:
        tensors, name = made.state_dict(), "mlp."
        layout = layout if family == "gpt-oss" else "transformers"
    config = MoEConfig(hidden_size=24, **changes)
    layer = MoEFeedForward(config)
    layer.load_state_dict(read_checkpoint(tensors, config, layout, prefix=f"model.layers.1.{name}"))
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def settings(**changes: Any) -> SimpleNamespace:
    names = {
        "num_local_experts": 4, "hidden_size": 6, "intermediate_size": 5, "moe_intermediate_size": 5,
        "hidden_act": "silu", "swiglu_limit": 0.5, "n_routed_experts": 4, "mlp_hidden_act": "relu2",
        "moe_latent_size": None, "mlp_bias": False, "_experts_implementation": "eager",
    }  # fmt: skip
    return SimpleNamespace(**{**names, **changes})


@pytest.mark.parametrize(
    ("kind", "changes", "activation"),
    [
        (MixtralExperts, {}, "swiglu"),
        (MixtralExperts, {"hidden_act": "relu"}, "reglu"),
        (MixtralExperts, {"hidden_act": "gelu"}, "geglu"),
        (MixtralExperts, {"hidden_act": "quick_gelu"}, None),
        (DeepseekV4Experts, {}, None),
        (DeepseekV4Experts, {"swiglu_limit": 1e9}, None),
        (NemotronHExperts, {}, None),
        (NemotronHExperts, {"mlp_hidden_act": "silu"}, "silu"),
    ],
)
def test_activations_are_recognised_or_stay_the_modules_own(
    kind: Any, changes: dict[str, Any], activation: str | None
) -> None:
    torch.manual_seed(0)
    experts = kind(settings(**changes)).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    assert dict(recognise(experts) or ()).get("activation") == activation
    operands = [torch.randn(7, 6).double().requires_grad_(), torch.rand(7, 2).double().requires_grad_()]
    index = torch.randint(0, 4, (7, 2))
    results = []
    for name in ("eager", "multigemm"):
        experts.config._experts_implementation = name
        y = experts(operands[0], index, operands[1])
        grads = torch.autograd.grad(y.square().sum(), [*operands, *experts.parameters()])
        results.append([y, *grads])
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_more_experts_of_a_token_than_the_layer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen, or more than there are on this rank: the composition computes it."""
    experts = MixtralExperts(settings(num_local_experts=20)).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    x, index = torch.randn(5, 6).double(), torch.stack([torch.randperm(20)[:17] for _ in range(5)])
    weights = torch.rand(5, 17).double()
    expected = experts(x, index, weights)
    experts.config._experts_implementation = "multigemm"
    torch.testing.assert_close(experts(x, index, weights), expected)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_compile(family: str) -> None:
    torch._dynamo.reset()
    made = model(family, torch.float32)
    made.set_experts_implementation("multigemm")
    experts = experts_of(made)[0]
    x, index, weights = torch.randn(6, 24), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index, weights), experts(x, index, weights))


def test_autocast() -> None:
    experts = experts_of(model("gpt-oss", torch.float32))[0]
    experts.config._experts_implementation = "multigemm"
    x, index, weights = torch.randn(6, 24), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, experts(x, index, weights), rtol=0.05, atol=0.05 * y.abs().max().item())
