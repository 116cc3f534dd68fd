"""Which implementation computes a layer of experts: precedence, chain, accelerators, third parties."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

import multigemm
from multigemm import _dispatch, errors
from multigemm._choice import Choice
from multigemm.accelerator import Accelerator, _cuda, _registry
from multigemm.moe import (
    ConfigBundle,
    MoEConfig,
    MoEFeedForward,
    MoEImplementation,
    MoERegistry,
    Support,
    registry,
    use,
)
from multigemm.moe._registry import select

NATIVE, OURS, DEFAULT = "multigemm_native_moe", "multigemm_moe", "pytorch_multi_gemm_moe"
VARIABLE = "MULTIGEMM_MOE_IMPLEMENTATION"
CONFIG = MoEConfig(hidden_size=4, intermediate_size=3, num_experts=4, top_k=2)
X = torch.zeros(2, 4)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    accelerators, implementations = dict(_registry._registered), dict(registry._registered)
    yield
    for table, before in (
        (_registry._registered, accelerators),
        (registry._registered, implementations),
    ):
        table.clear()
        table.update(before)
    _registry._cache.clear()
    registry._keys.clear()


# --- accelerators ---------------------------------------------------------------------------------


class Stub(Accelerator):
    """An accelerator as a third party would write it."""

    answer: str | None = None
    can: object | None = None

    def capability(self) -> object | None:
        return self.can

    def get_property(self, key: str) -> str | None:
        return self.answer if key == "multi_gemm_moe" else None


def stub(capability: object | None, answer: str | None) -> type[Stub]:
    return type("Stub", (Stub,), {"can": capability, "answer": answer})


ACCELERATORS = {
    # capability, answer of get_property -> implementation, source, what is refused on the way
    "H100-like": ((9, 0), OURS, OURS, "property", []),
    "H100-like, its kernels elsewhere": ((9, 0), NATIVE, OURS, "property", [NATIVE]),
    "A100-like": ((8, 0), DEFAULT, DEFAULT, "property", []),
    "AMD-like": ("gfx942", OURS, OURS, "property", []),
    "NPU-like, knows no property": (None, None, DEFAULT, "default", []),
    "NPU-like, prefers what is not installed": (None, "npu_moe", OURS, "property", ["npu_moe"]),
    "prefers what its user may have removed": ((9, 0), "cutlass_multi_gemm_moe", OURS, "property",
                                               ["cutlass_multi_gemm_moe"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCELERATORS)
def test_accelerators(case: str) -> None:
    """A device type without any backend of ours, so that the table is the same on every machine."""
    capability, answer, name, source, refused = ACCELERATORS[case]
    multigemm.register_accelerator("xpu", stub(capability, answer))
    selection = registry.choose(CONFIG, "xpu:1")
    assert (selection.name, selection.choice.source) == (name, source)
    assert list(selection.refused) == refused
    found = registry.explain(CONFIG, "xpu:1")
    assert (found.implementation, found.source, found.device) == (name, source, "xpu:1")
    assert found.capability == (None if capability is None else str(capability))
    assert found.named == (answer or DEFAULT) and set(found.reasons) >= set(refused)
    assert type(registry.instantiate(CONFIG, "xpu:1")) is registry.get(name)
    # The user's word is stronger, and makes two machines alike.
    for pinned in (OURS, DEFAULT):
        assert registry.choose(ConfigBundle(name=pinned, config=CONFIG), "xpu:1").name == pinned


def test_an_unknown_accelerator_gets_the_default() -> None:
    for kind in ("mps", "hpu", "privateuseone"):
        assert multigemm.get_accelerator(kind).get_property("multi_gemm_moe") is None
        assert registry.choose(CONFIG, kind)[:2] == (DEFAULT, Choice(DEFAULT, "default"))


CUDA13 = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_120"]
CUDA = [
    # count, capability, architectures of the backend (None: none is installed) -> answer
    pytest.param(1, (9, 0), CUDA13, NATIVE, id="H100"),
    pytest.param(1, (8, 0), CUDA13, NATIVE, id="A100"),
    pytest.param(1, (8, 7), CUDA13, NATIVE, id="8.7 runs code for 8.0"),
    pytest.param(1, (7, 0), CUDA13, None, id="V100, older than any code"),
    pytest.param(1, (13, 0), CUDA13, NATIVE, id="newer, by PTX"),
    pytest.param(1, (11, 0), CUDA13, None, id="between, and PTX is for 12.0"),
    pytest.param(1, (9, 1), ["sm_90a"], None, id="9.0a is for 9.0 alone"),
    pytest.param(1, (9, 0), None, None, id="no backend"),
    pytest.param(0, (9, 0), CUDA13, None, id="no device"),
]


@pytest.mark.parametrize(("count", "capability", "architectures", "answer"), CUDA)
def test_cuda_answers_by_capability_and_what_is_installed(
    count: int, capability: Any, architectures: Any, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, architectures, count, capability)
    cuda = _cuda.CUDAAccelerator(torch.device("cuda:0"))
    assert cuda.get_property("multi_gemm_moe") == answer and cuda.get_property("grouped_mm") is None


@pytest.mark.parametrize(("architecture", "answer"), [("gfx942:sramecc+:xnack-", NATIVE), ("gfx1100", None)])
def test_rocm(architecture: str, answer: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["gfx90a", "gfx942"], 1, architecture)
    rocm = _cuda.ROCmAccelerator(torch.device("cuda:0"))
    assert rocm.get_property("multi_gemm_moe") == answer


def pretend(
    monkeypatch: pytest.MonkeyPatch, architectures: list[str] | None, count: int, capability: Any
) -> None:
    """torch.cuda with ``count`` devices, and a backend for them."""

    def backend_for(device_type: str) -> Any:
        if architectures is None:
            raise errors.NotInstalled("none")
        return SimpleNamespace(info={"architectures": architectures})

    monkeypatch.setattr(_dispatch, "backend_for", backend_for)
    cuda = SimpleNamespace(
        device_count=lambda: count,
        get_device_capability=lambda device: capability,
        get_device_properties=lambda device: SimpleNamespace(gcnArchName=capability),
    )
    monkeypatch.setattr(torch, "cuda", cuda)


def test_a_gpu_without_a_backend_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, 1, (9, 0))
    assert registry.supports_config(OURS, CONFIG, "cuda:0") == (
        False, "grouped_mm has no backend for 'cuda': none",
    )  # fmt: skip
    assert registry.choose(CONFIG, "cuda:0").name == DEFAULT
    with pytest.raises(errors.OptionError, match="has no backend for 'cuda'"):
        registry.choose(ConfigBundle(name=OURS, config=CONFIG), "cuda:0")


def test_the_cpu_answers_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = multigemm.get_accelerator("cpu")
    for backend, answer in ((object(), OURS), (None, None)):
        monkeypatch.setattr(_dispatch, "backend_for", lambda device_type, backend=backend: backend)
        assert cpu.get_property("multi_gemm_moe") == answer


# --- precedence -----------------------------------------------------------------------------------

SOURCES = ("argument", "context", "environment", "property")


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_precedence(given: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """argument > context > environment > property > default, for all sixteen cases and in every caller."""
    argument, context, environment, prefers = given
    multigemm.register_accelerator("cpu", stub(None, OURS if prefers else None))
    if environment:
        monkeypatch.setenv(VARIABLE, DEFAULT)
    layer = MoEFeedForward(CONFIG, implementation=OURS if argument else None)
    with use(DEFAULT if context else None):
        found = layer.explain()
        made = getattr(registry.instances, layer.bundle._key(None, "cpu", torch.float32))
        assert registry.instantiate(layer.bundle, "cpu").name == found.implementation == made.name
    expected = next((s for s, there in zip(SOURCES, given, strict=True) if there), "default")
    assert found.source == expected
    assert found.implementation == (OURS if expected in ("argument", "property") else DEFAULT)
    assert f"asked for: {found.named} ({expected})" in str(found) and found.as_dict()["source"] == expected


def test_the_layer_obeys_the_pin_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def spy(name: str) -> Any:
        experts = registry.get(name).experts

        def run(self: MoEImplementation, *arguments: Any) -> torch.Tensor:
            calls.append(self.name)
            return experts(self, *arguments)

        return run

    for name in (OURS, DEFAULT):
        monkeypatch.setattr(registry.get(name), "experts", spy(name))
    layer = MoEFeedForward(CONFIG)
    with use(OURS):
        layer(X)
        with use(DEFAULT):
            layer(X)
            with use(None):
                monkeypatch.setenv(VARIABLE, OURS)
                layer(X)
        MoEFeedForward(CONFIG, implementation=DEFAULT)(X)
    assert calls == [OURS, DEFAULT, OURS, DEFAULT]


def test_unknown_names_of_a_user_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = f"there is no implementation 'fast'; there are: {NATIVE}, {OURS}, {DEFAULT}"
    with pytest.raises(errors.OptionError, match=sentence), use("fast"):
        pass
    with pytest.raises(errors.OptionError, match=sentence):
        MoEFeedForward(CONFIG, implementation="fast")
    bundle = ConfigBundle(name="fast", config=CONFIG, on_refusal="fall_back")
    with pytest.raises(errors.OptionError, match=sentence):
        registry.instantiate(bundle, "cpu")
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(errors.OptionError, match=sentence):
        MoEFeedForward(CONFIG)(X)


# --- the chain ------------------------------------------------------------------------------------

CHAIN = [
    # asked for, source, on_refusal, what supports the configuration -> name, or None for an error
    ("a", "argument", None, "abc", "a"),
    ("a", "argument", None, "bc", None),
    ("a", "argument", "fall_back", "bc", "b"),
    ("a", "argument", "fall_back", "c", "c"),
    ("a", "context", None, "b", None),
    ("a", "environment", None, "b", None),
    ("a", "environment", "fall_back", "b", "b"),
    ("a", "property", None, "b", "b"),
    ("a", "property", "raise", "b", None),
    ("b", "property", None, "ac", "c"),  # from its own place on, not back to what is before it
    ("b", "property", None, "a", None),
    ("z", "property", None, "ac", "a"),  # not in the chain: all of it
    ("c", "default", None, "ab", None),
    ("c", "default", "raise", "c", "c"),
]


@pytest.mark.parametrize(("name", "source", "on_refusal", "able", "expected"), CHAIN)
def test_chain(name: str, source: str, on_refusal: Any, able: str, expected: str | None) -> None:
    def supports(candidate: str) -> Support:
        return Support(candidate in able, "" if candidate in able else f"not {candidate}")

    if expected is None:
        with pytest.raises(errors.OptionError, match=rf"asked for '{name}' \({source}\).*not {name}"):
            select(Choice(name, source), supports, on_refusal, "abc")
        return
    found = select(Choice(name, source), supports, on_refusal, "abc")
    assert found.name == expected and all(why == f"not {n}" for n, why in found.refused.items())
    assert expected not in found.refused


def test_a_refused_dtype_names_the_reason() -> None:
    config = MoEConfig(**{**CONFIG.model_dump(), "input_dtype": "float8_e4m3fn"})
    for name in (OURS, DEFAULT):
        support = registry.supports_config(name, config, "cpu")
        assert not support and "input_dtype is float8_e4m3fn; products have float64" in support.reason
    with pytest.raises(errors.OptionError, match=f"{DEFAULT}: input_dtype is float8_e4m3fn"):
        registry.instantiate(config, "cpu")
    assert registry.supports_config("fast", CONFIG, "cpu").reason.startswith("multigemm.moe: there is no")
    assert registry.supports_config(OURS, CONFIG, "cpu") == Support(True)


# --- third parties --------------------------------------------------------------------------------


class Picky(MoEImplementation):
    """Computes two experts of a token and no other number."""

    name = "picky"

    @classmethod
    def supports_config(cls, config: MoEConfig, device: torch.device) -> Support:
        return Support(config.top_k == 2, f"top_k is {config.top_k}, it has to be 2")

    def experts(self, x: torch.Tensor, routing: Any, *weights: Any) -> torch.Tensor:
        return torch.full_like(x, 42.0)


def test_registration() -> None:
    registry.register(Picky)
    assert registry.names() == (NATIVE, OURS, DEFAULT, "picky")
    layer = MoEFeedForward(CONFIG, implementation="picky")
    assert torch.equal(layer(X), torch.full_like(X, 42.0))
    three = CONFIG.model_copy(update={"top_k": 3})
    with pytest.raises(errors.OptionError, match=r'top_k is 3, it has to be 2\. on_refusal="fall_back"'):
        MoEFeedForward(three, implementation="picky")(X)
    for chain, expected in ((None, OURS), ((DEFAULT,), DEFAULT)):
        bundle = ConfigBundle(name="picky", config=three, on_refusal="fall_back", chain=chain)
        found = MoEFeedForward(bundle).explain()
        assert found.implementation == expected and found.reasons["picky"] == "top_k is 3, it has to be 2"
    with pytest.raises(errors.OptionError, match="'picky' is registered already; pass replace=True"):
        registry.register(Picky)
    registry.register(Picky, replace=True)
    for wrong in (object, "picky", type("Nameless", (Picky,), {"name": ""})):
        with pytest.raises(errors.OptionError, match="register:"):
            registry.register(wrong)  # type: ignore[type-var]
    assert "picky" not in MoERegistry().names()


def test_options() -> None:
    bundle = ConfigBundle(name=OURS, config=CONFIG, implementation_config={"implementation": "reference"})
    made = registry.instantiate(bundle, "cpu")
    assert made.product_options() == {"implementation": "reference", "precision": None}
    MoEFeedForward(bundle)(X)
    for name, options in (
        (OURS, {"tile": 64}),
        (NATIVE, {"tile": 64}),
        (OURS, {"precision": "low"}),
        (DEFAULT, {"tile": 64}),
    ):
        wrong = ConfigBundle(name=name, config=CONFIG, implementation_config=options)
        with pytest.raises(errors.OptionError, match=f"{name}: implementation_config .* does not fit"):
            MoEFeedForward(wrong)


def test_entry_point(tmp_path: Path) -> None:
    """An installed package's implementation is found by its name; a broken one disturbs nobody else."""
    (tmp_path / "their_moe.py").write_text(
        textwrap.dedent("""
            import torch
            from multigemm.moe import MoEImplementation, Support

            class Theirs(MoEImplementation):
                name = "theirs"

                @classmethod
                def supports_config(cls, config, device):
                    return Support(True)

                def experts(self, x, routing, *weights):
                    return torch.full_like(x, 7.0)
        """)
    )
    info = tmp_path / "their_moe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-moe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[multigemm.moe_implementations]\ntheirs = their_moe:Theirs\nbroken = their_moe:Missing\n"
    )
    code = """
        import torch
        from multigemm.moe import MoEConfig, MoEFeedForward, registry
        config = MoEConfig(hidden_size=4, intermediate_size=3, num_experts=4, top_k=2)
        print(*registry.names())
        print(MoEFeedForward(config, implementation="theirs")(torch.zeros(1, 4)).tolist())
        print(registry.supports_config("broken", config, "cpu").reason)
        print(MoEFeedForward(config).explain().reasons["broken"])
    """
    path = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, values, *reasons = done.stdout.splitlines()
    assert names == f"{NATIVE} {OURS} {DEFAULT} broken theirs" and values == "[[7.0, 7.0, 7.0, 7.0]]"
    assert all("provided by their-moe" in r and "fails to load" in r for r in reasons)
