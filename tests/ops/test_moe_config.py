"""The configuration of a mixture-of-experts layer, and what importing it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from multigemm.moe import ConfigBundle, MoEConfig

GOOD: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 3, "num_experts": 8, "top_k": 2}

BAD = {
    "top_k 0": ({"top_k": 0}, "greater than or equal to 1"),
    "top_k 17": ({"top_k": 17, "num_experts": 32}, "less than or equal to 16"),
    "top_k over experts": ({"top_k": 9}, "top_k must be at most num_experts = 8, got 9"),
    "width 0": ({"hidden_size": 0}, "hidden_size"),
    "activation": ({"activation": "tanh"}, "activation"),
    "score": ({"score_function": "linear"}, "score_function"),
    "groups": ({"num_expert_groups": 3}, "num_expert_groups must divide num_experts = 8, got 3"),
    "best groups": (
        {"num_expert_groups": 2, "top_k_groups": 3}, "top_k_groups must be at most num_expert_groups = 2",
    ),
    "too few in the groups": (
        {"num_expert_groups": 4, "top_k": 3}, "top_k must be at most the 2 experts of top_k_groups = 1",
    ),
    "one in a group": ({"num_expert_groups": 8, "top_k_groups": 2}, "two experts or more in each group"),
    "gate without expert": ({"shared_gate": True}, "shared_gate needs a shared expert"),
    "plain in turn": (
        {"activation": "relu", "gate_up_layout": "interleaved"}, "needs a gated activation, got 'relu'",
    ),
    "integers": ({"input_dtype": torch.int64}, "must be a floating-point dtype"),
    "no dtype": ({"input_dtype": "float7"}, "input_dtype"),
    "unknown field": ({"experts": 8}, "experts"),
    "limit": ({"clamp_limit": -1.0}, "clamp_limit"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_values(case: str) -> None:
    changes, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        MoEConfig(**{**GOOD, **changes})


def test_dtypes_by_name_and_as_json() -> None:
    config = MoEConfig(**GOOD, input_dtype="bfloat16", output_dtype="torch.float32")
    assert (config.input_dtype, config.output_dtype) == (torch.bfloat16, torch.float32)
    assert MoEConfig.model_validate_json(config.model_dump_json()) == config
    assert '"input_dtype":"bfloat16"' in config.model_dump_json()


def test_it_is_a_value() -> None:
    config = MoEConfig(**GOOD)
    assert config == MoEConfig(**GOOD) and hash(config) == hash(MoEConfig(**GOOD))
    with pytest.raises(ValueError, match="frozen"):
        config.top_k = 3
    assert config.gated and config.up_width == 6
    assert MoEConfig(**GOOD, activation="relu").up_width == 3


def test_bundle() -> None:
    bundle = ConfigBundle(name="multigemm_moe", config=GOOD, implementation_config={"precision": "ieee"})
    assert bundle.config == MoEConfig(**GOOD)
    assert ConfigBundle.model_validate_json(bundle.model_dump_json()) == bundle
    with pytest.raises(ValueError, match="needs the name of the implementation"):
        ConfigBundle(config=GOOD, implementation_config={"precision": "ieee"})
    with pytest.raises(ValueError, match="on_refusal"):
        ConfigBundle(config=GOOD, on_refusal="ignore")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_layer_needs_pydantic() -> None:
    out = run(
        """
        import sys, multigemm
        print("pydantic" in sys.modules, "multigemm.moe" in sys.modules)
        sys.modules["pydantic"] = None  # as if it were not installed
        try:
            import multigemm.moe
        except ImportError as error:
            print(error)
        """
    )
    first, second = out.splitlines()
    assert first == "False False"
    assert second.startswith("multigemm.moe needs pydantic, which is not installed: python -m pip install")
    assert '"multigemm[moe]"' in second
