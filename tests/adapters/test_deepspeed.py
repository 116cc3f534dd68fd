"""DeepSpeed's registry, accelerator, heuristic and experts, with DeepSpeed itself on the CPU.

Its own mixture-of-experts kernels need a GPU, so values are compared with its definition, written out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("pydantic")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what DeepSpeed imports
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.inference.v2.inference_utils import ActivationType
    from deepspeed.inference.v2.model_implementations.common_parameters import moe_parameters
    from deepspeed.inference.v2.modules import heuristics
    from deepspeed.inference.v2.modules.configs import DSMoEConfig
    from deepspeed.inference.v2.modules.interfaces import DSMoEBase, DSMoERegistry
    from deepspeed.inference.v2.modules.module_registry import ConfigBundle
    from deepspeed.moe import ep_experts

import multigemm
from multigemm import errors
from multigemm.accelerator import _registry
from multigemm.integrations import deepspeed as adapter

GATED = {ActivationType.GEGLU: "gelu", ActivationType.ReGLU: "relu", ActivationType.SiGLU: "silu"}
PLAIN = {ActivationType.GELU: "gelu", ActivationType.RELU: "relu", ActivationType.SILU: "silu"}
FUNCTIONS = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu}
E, H, W = 5, 8, 6


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = get_accelerator()
    for name in ("_registered", "_cache"):
        monkeypatch.setattr(_registry, name, {})
    monkeypatch.setattr(DSMoERegistry, "registry", dict(DSMoERegistry.registry))
    yield
    set_accelerator(before)


def config(**changes: Any) -> DSMoEConfig:
    base = {
        "max_tokens": 32, "model_dim": H, "intermediate_features": W, "n_experts": E, "top_k": 2,
        "input_dtype": "fp32", "output_dtype": "fp32", "activation": ActivationType.SiGLU,
        "normalize_scores": True,
    }  # fmt: skip
    return DSMoEConfig(**{**base, **changes})


def made(settings: DSMoEConfig, **options: Any) -> Any:
    adapter.register()
    bundle = ConfigBundle(name="multigemm_moe", config=settings, implementation_config=options)
    return DSMoERegistry.instantiate_config(bundle)


def weights(gated: bool) -> tuple[torch.Tensor, ...]:
    """Router, gate, up and down as lists of a checkpoint have them: [out, in] for each expert."""
    torch.manual_seed(0)
    router, gate, up = torch.randn(E, H), torch.randn(E, W, H), torch.randn(E, W, H)
    return router, gate if gated else up, up, torch.randn(E, H, W)


def expected(x: Any, parts: Any, c: Any, b1: Any = None, b2: Any = None) -> torch.Tensor:
    """The layer as DeepSpeed defines it, token by token in float64; b1 is for gate and up in turn."""
    router, gate, up, down = (p.double() for p in parts)
    kind = ActivationType(c.activation)
    act = FUNCTIONS[GATED.get(kind) or PLAIN[kind]]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        scores = (router @ row).softmax(0)
        best = scores.topk(c.top_k)
        total = best.values.sum() if c.normalize_scores else 1.0
        for p, e in zip(best.values, best.indices, strict=True):
            if kind in GATED:
                g, u = gate[e] @ row, up[e] @ row
                if b1 is not None:
                    g, u = g + b1[e, ::2], u + b1[e, 1::2]
                h = act(g) * u
            else:
                h = act(up[e] @ row + (0 if b1 is None else b1[e]))
            y[t] += p / total * (down[e] @ h + (0 if b2 is None else b2[e]))
    return y


def parameters(module: Any, parts: Any, gated: bool) -> tuple[Any, ...]:
    """Through DeepSpeed's own containers of checkpoint tensors, which lay gate and up out in turn."""
    router, gate, up, down = parts
    model = SimpleNamespace(
        transform_moe_gate_param=module.transform_gate_param,
        transform_moe_mlp_1_param=module.transform_moe_mlp_1_param,
        transform_moe_mlp_2_param=module.transform_moe_mlp_2_param,
    )
    first = moe_parameters.UnfusedMoEGatedMLPParameter if gated else moe_parameters.UnfusedMoEMLP1Parameter
    lists = {"gating_experts": gate, "up_experts": up} if gated else {"experts": up}
    return (
        moe_parameters.MoEGatingWeightParameter.finalize(
            SimpleNamespace(params=router, inference_model=model)
        ),
        first.finalize(SimpleNamespace(inference_model=model, **{n: list(t) for n, t in lists.items()})),
        moe_parameters.UnfusedMoEMLP2Parameter.finalize(
            SimpleNamespace(inference_model=model, experts=list(down))
        ),
    )


class Batch:
    """What the module reads of a ``RaggedBatchWrapper``, which needs a compiled extension."""

    def __init__(self, tokens: int) -> None:
        self.buffer = torch.tensor([tokens, 1], dtype=torch.int32)

    def batch_metadata_buffer(self, on_device: bool = True) -> torch.Tensor:
        return self.buffer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("activation", [*GATED, *PLAIN], ids=str)
def test_values(activation: Any, normalize: bool, bias: bool) -> None:
    settings = config(activation=activation, normalize_scores=normalize)
    module, gated = made(settings), activation in GATED
    parts, x = weights(gated), torch.randn(7, H)
    gate_w, w1, w2 = parameters(module, parts, gated)
    b1, b2 = (torch.randn(E, 2 * W if gated else W), torch.randn(E, H)) if bias else (None, None)
    y = module(x, Batch(7), gate_w, w1, w2, b1, b2)
    torch.testing.assert_close(y, expected(x, parts, settings, b1, b2).float(), rtol=1e-4, atol=1e-4)
    assert y.data_ptr() == module.output.data_ptr() and module.output.shape == (32, H)
    assert isinstance(module, DSMoEBase) and module.name() == "multigemm_moe"
    if bias:  # one of the two alone
        y = module(x, None, gate_w, w1, w2, None, b2)
        torch.testing.assert_close(y, expected(x, parts, settings, None, b2).float(), rtol=1e-4, atol=1e-4)


def test_rows_that_pad_the_batch_get_zeros() -> None:
    settings = config()
    module = made(settings)
    parts = weights(True)
    x = torch.randn(9, H)
    x[6:] = float("nan")
    y = module(x, Batch(6), *parameters(module, parts, True))
    torch.testing.assert_close(y[:6], expected(x[:6], parts, settings).float(), rtol=1e-4, atol=1e-4)
    assert not y[6:].any()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_dtypes_and_any_top_k(dtype: str, top_k: int) -> None:
    settings = config(input_dtype=dtype, output_dtype="fp32", top_k=top_k)
    module = made(settings, weight_dtype=settings.input_dtype, implementation="pytorch_multi_gemm_moe")
    parts = weights(True)
    gate_w, w1, w2 = parameters(module, parts, True)
    assert w1.dtype == w2.dtype == gate_w.dtype == settings.input_dtype
    x = torch.randn(4, H).to(settings.input_dtype)
    y = module(x, None, gate_w, w1, w2)
    assert y.dtype == torch.float32
    rounded = [p.to(settings.input_dtype) for p in parts]
    bound = 0.05 * expected(x, rounded, settings).abs().max().item()
    torch.testing.assert_close(y, expected(x, rounded, settings).float(), rtol=0, atol=bound)


def test_what_is_not_supported_is_refused() -> None:
    for changes in (
        {"activation": ActivationType.IDENTITY},
        {"top_k": 17, "n_experts": 32},
        {"input_dtype": "int8"},
    ):
        with pytest.raises(ValueError, match="is not supported by"):
            made(config(**changes))
    with pytest.raises(errors.OptionError, match="implementation_config has tile; there are weight_dtype"):
        made(config(), tile=3)
    with pytest.raises(errors.OptionError, match="weight_dtype must be that of the input"):
        made(config(), weight_dtype=torch.int8)
    module = made(config(max_tokens=3))
    with pytest.raises(errors.ShapeError, match="at most max_tokens = 3 rows, got 4"):
        module(torch.randn(4, H), None, *parameters(module, weights(True), True))


class Preferring(multigemm.accelerator.Accelerator):
    def get_property(self, key: str) -> str | None:
        return "multigemm_moe" if key == "multi_gemm_moe" else "other"


def test_property() -> None:
    multigemm.register_accelerator("cpu", multigemm.accelerator.Accelerator)
    assert adapter.get_property("multi_gemm_moe") is None
    multigemm.register_accelerator("cpu", Preferring, replace=True)
    assert adapter.get_property("multi_gemm_moe") == "multigemm_moe"
    assert adapter.get_property("grouped_mm") is None
    before = get_accelerator()
    assert not hasattr(before, "get_property")
    extended = adapter.extend_accelerator()
    assert get_accelerator() is extended and isinstance(extended, type(before))
    assert extended.get_property("multi_gemm_moe") == "multigemm_moe" and extended.get_property("x") is None
    assert extended.device_name() == before.device_name() and adapter.extend_accelerator() is extended


def test_a_property_of_the_accelerators_own_comes_first() -> None:
    multigemm.register_accelerator("cpu", Preferring)

    class Theirs(type(get_accelerator())):  # type: ignore[misc]
        def get_property(self, key: str) -> str | None:
            return "theirs" if key == "attention" else None

    extended = adapter.extend_accelerator(Theirs())
    assert extended.get_property("attention") == "theirs"
    assert extended.get_property("multi_gemm_moe") == "multigemm_moe"


@pytest.mark.parametrize("prefers", [False, True])
def test_models_choose_by_the_property(prefers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    multigemm.register_accelerator("cpu", Preferring if prefers else multigemm.accelerator.Accelerator)
    asked: list[str] = []
    instantiate = DSMoERegistry.instantiate_config

    def spy(bundle: Any) -> Any:
        asked.append(bundle.name)
        return instantiate(bundle) if bundle.name == "multigemm_moe" else None

    monkeypatch.setattr(DSMoERegistry, "instantiate_config", spy)
    before = heuristics.instantiate_moe
    with adapter.chosen_by_property():
        heuristics.instantiate_moe(config(), None)
        heuristics.instantiate_moe(config(activation=ActivationType.IDENTITY), None)
    with adapter.chosen_by_property("multigemm_moe"):
        heuristics.instantiate_moe(config(), None)
    assert heuristics.instantiate_moe is before
    default = "cutlass_multi_gemm_moe"
    assert asked == ["multigemm_moe" if prefers else default, default, "multigemm_moe"]


@pytest.mark.parametrize("activation", sorted(ep_experts.EXPERT_ACTIVATIONS))
def test_experts_of_autoep(activation: str) -> None:
    torch.manual_seed(0)
    theirs = ep_experts.GroupedExperts(
        8, 6, 4, use_grouped_mm=False, activation=activation, activation_limit=0.5
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    holder = torch.nn.ModuleDict({"experts": theirs})
    counts = torch.tensor([3, 0, 4, 2])
    x = torch.randn(11, 8, requires_grad=True)
    outcomes = []
    for number in (0, 1):
        if number:
            keys = list(holder.state_dict())
            assert adapter.convert(holder) == 1 and adapter.convert(holder) == 0
            assert list(holder.state_dict()) == keys and isinstance(theirs, ep_experts.GroupedExperts)
        y = theirs(x, counts)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, *theirs.parameters()])])
    for ours, own in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    assert not outcomes[1][0][9:].any()


def test_names() -> None:
    assert adapter.DSMultigemmMoE.name() == adapter.register() == "multigemm_moe"
    assert deepspeed.__version__
    with pytest.raises(AttributeError, match="no attribute 'DSNothing'"):
        adapter.DSNothing  # noqa: B018
