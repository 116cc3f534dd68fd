"""Weights from the layouts of checkpoints: the same layer, however they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_oracle
import pytest
import torch

pytest.importorskip("pydantic")

from moe_kit import SMALL, close, tokens

from multigemm import errors
from multigemm.moe import LAYOUTS, CheckpointLayout, MoEConfig, MoEFeedForward, read_checkpoint

E, H, W, S = 8, 6, 5, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen3-moe": {}, "llama4": {"shared_intermediate_size": S},
    "qwen2-moe": {"shared_intermediate_size": S, "shared_gate": True, "renormalize": False},
    "deepseek": {
        "score_function": "sigmoid", "score_correction_bias": True, "shared_intermediate_size": S,
    },
    "transformers": {"score_correction_bias": True, "shared_intermediate_size": S},
    "torchtitan": {"score_correction_bias": True, "shared_intermediate_size": S},
    "gpt-oss": {"activation": "clamped_swiglu", "expert_bias": True, "router_bias": True},
}  # fmt: skip


def parts(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The layer's numbers, gate and up apart, each expert's weight [out, in]."""
    g = torch.Generator().manual_seed(0)
    shapes = {
        "router": (E, H), "gate": (E, W, H), "up": (E, W, H), "down": (E, H, W), "router_bias": (E,),
        "gate_bias": (E, W), "up_bias": (E, W), "down_bias": (E, H), "score_correction_bias": (E,),
        "shared": (3, S, H), "shared_gate": (1, H),
    }  # fmt: skip
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}


def stored(
    layout: CheckpointLayout, p: dict[str, torch.Tensor], settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The same numbers as a checkpoint of that layout has them."""
    found: dict[str, torch.Tensor] = {}

    def put(name: str | None, weight: torch.Tensor) -> None:
        if name is None:
            return
        if weight.dim() == 3 and layout.transposed:
            weight = weight.mT.contiguous()
        found.update({name.format(e=e): w for e, w in enumerate(weight)} if "{e}" in name else {name: weight})

    def fused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack([a, b], 2).flatten(1, 2) if layout.interleaved else torch.cat([a, b], 1)

    for name in ("gate", "up", "down"):
        put(getattr(layout, name), p[name])
    put(layout.gate_up, fused(p["gate"], p["up"]))
    if settings.get("expert_bias"):
        for name in ("gate_bias", "up_bias", "down_bias"):
            put(getattr(layout, name), p[name])
        put(layout.gate_up_bias, fused(p["gate_bias"], p["up_bias"]))
    found[layout.router] = p["router"]
    for name in ("router_bias", "score_correction_bias", "shared_gate"):
        if settings.get(name) and getattr(layout, name):
            found[getattr(layout, name)] = p[name]
    if settings.get("shared_intermediate_size") and layout.shared:
        gate, up, down = p["shared"]
        found.update(zip(layout.shared, (gate, up, down.mT), strict=True))
    return found


def expected(p: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's tensors: gate, then up, whatever the layer's own order is."""
    w = {
        "router.weight": p["router"], "gate_up_proj": torch.cat([p["gate"], p["up"]], 1).mT,
        "down_proj": p["down"].mT,
    }  # fmt: skip
    if settings.get("router_bias"):
        w["router.bias"] = p["router_bias"]
    if settings.get("expert_bias"):
        w |= {
            "gate_up_proj_bias": torch.cat([p["gate_bias"], p["up_bias"]], 1),
            "down_proj_bias": p["down_bias"],
        }
    if settings.get("score_correction_bias"):
        w["score_correction_bias"] = p["score_correction_bias"].float().double()
    if settings.get("shared_intermediate_size"):
        gate, up, down = p["shared"]
        w |= {"shared_gate_up_proj": torch.cat([gate, up]).mT, "shared_down_proj": down}
    if settings.get("shared_gate"):
        w["shared_gate"] = p["shared_gate"].mT
    return w


@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_the_same(layout: str, order: str) -> None:
    settings = {**SMALL, **SETTINGS[layout]}
    p = parts(settings)
    other = {"model.layers.1.mlp.gate.weight": torch.zeros(1)}
    tensors = {f"model.layers.0.mlp.{n}": t for n, t in stored(LAYOUTS[layout], p, settings).items()} | other
    config = MoEConfig(**settings, input_dtype=torch.float64, gate_up_layout=order)
    state = read_checkpoint(tensors, config, layout, prefix="model.layers.0.mlp.")
    layer = MoEFeedForward(config)
    layer.load_state_dict(state)
    x = tokens(9, torch.device("cpu"))
    close(layer(x), moe_oracle.feed_forward(x, expected(p, settings), settings), torch.float64, 256)


VARIETIES = {
    "fused in turn": CheckpointLayout(gate_up="w13", down="w2", interleaved=True),
    "fused in turn, transposed": CheckpointLayout(
        gate_up="w13", down="w2", interleaved=True, transposed=True
    ),
    "fused": CheckpointLayout(gate_up="w13", down="w2"),
    "fused, transposed": CheckpointLayout(gate_up="w13", down="w2", transposed=True),
    "fused lists": CheckpointLayout(gate_up="{e}.w13", down="{e}.w2", interleaved=True),
    "transposed lists": CheckpointLayout(gate="{e}.w1", up="{e}.w3", down="{e}.w2", transposed=True),
    "biases": CheckpointLayout(
        gate="w1", up="w3", down="w2", gate_bias="{e}.b1", up_bias="b3", down_bias="{e}.b2", router_bias="r"
    ),
}


@pytest.mark.parametrize("variety", VARIETIES)
def test_layouts_of_ones_own(variety: str) -> None:
    layout = VARIETIES[variety]
    settings = {**SMALL, "expert_bias": layout.down_bias is not None}
    p = parts(settings)
    state = read_checkpoint(stored(layout, p, settings), MoEConfig(**settings), layout)
    for name, tensor in expected(p, settings).items():
        assert torch.equal(state[name], tensor), name


def test_plain_activations() -> None:
    settings = {**SMALL, "activation": "relu", "shared_intermediate_size": S}
    p = parts(settings)
    tensors = {
        "gate.weight": p["router"],
        "up": p["up"],
        "down": p["down"],
        "su": p["shared"][1],
        "sd": p["shared"][2].mT,
    }
    layout = CheckpointLayout(up="up", down="down", shared=("sg", "su", "sd"))
    state = read_checkpoint(tensors, MoEConfig(**settings), layout)
    assert torch.equal(state["gate_up_proj"], p["up"].mT)
    assert torch.equal(state["shared_gate_up_proj"], p["shared"][1].mT)
    MoEFeedForward(MoEConfig(**settings, input_dtype=torch.float64)).load_state_dict(state)


@pytest.mark.parametrize("layout", ["mixtral", "gpt-oss"])
def test_some_of_the_experts(layout: str) -> None:
    """Those of one process; tensors of the others are not even looked at."""
    settings = {**SMALL, **SETTINGS[layout]}
    tensors = stored(LAYOUTS[layout], parts(settings), settings)
    config = MoEConfig(**settings)
    everything = read_checkpoint(tensors, config, layout)

    class Lazy(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            assert ".6." not in name
            return super().__getitem__(name)

    some = read_checkpoint(Lazy(tensors), config, layout, experts=range(2, 5))
    for name, tensor in some.items():
        whole = everything[name]
        assert torch.equal(tensor, whole if name.startswith("router") else whole[2:5]), name


def test_stacked_weights_are_not_copied() -> None:
    settings = {**SMALL, **SETTINGS["gpt-oss"], "gate_up_layout": "interleaved"}
    tensors = stored(LAYOUTS["gpt-oss"], parts(settings), settings)
    state = read_checkpoint(tensors, MoEConfig(**settings), "gpt-oss")
    assert state["gate_up_proj"].data_ptr() == tensors["experts.gate_up_proj"].data_ptr()
    assert state["down_proj"].data_ptr() == tensors["experts.down_proj"].data_ptr()


def test_what_does_not_fit_is_told() -> None:
    settings = {**SMALL, **SETTINGS["gpt-oss"]}
    tensors, config = stored(LAYOUTS["gpt-oss"], parts(settings), settings), MoEConfig(**settings)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"layout": "gpt"}, errors.OptionError, "there is no layout 'gpt'; there are: mixtral"),
        ({"layout": "qwen3-moe"}, errors.OptionError, r"'gate.weight' is missing; names .*down_proj"),
        ({"prefix": "mlp."}, errors.OptionError, r"'mlp\.router\.weight' is missing; .* 'mlp\.': none"),
        (
            {"config": MoEConfig(**{**settings, "expert_bias": False})}, errors.OptionError,
            r"no place for experts\.down_proj_bias, experts\.gate_up_proj_bias",
        ),
        (
            {"layout": replace(LAYOUTS["gpt-oss"], transposed=False)}, errors.ShapeError,
            r"must have shape \[8, 10, 6\], got \[8, 6, 10\]\. It has the one .* with transposed=True",
        ),
        (
            {"config": MoEConfig(**{**settings, "score_correction_bias": True})}, errors.OptionError,
            "needs score_correction_bias, and the layout has none",
        ),
    ]  # fmt: skip
    for changes, kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            read_checkpoint(**{"tensors": tensors, "config": config, "layout": "gpt-oss", **changes})
