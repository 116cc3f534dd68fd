"""DeepSpeed: a module of its inference engine, a property of its accelerator, and its experts in training.

    from multigemm.integrations import deepspeed as adapter
    adapter.register()                  # DSMoERegistry has "multigemm_moe"
    adapter.extend_accelerator()        # get_accelerator().get_property("multi_gemm_moe")
    with adapter.chosen_by_property():  # models made here take the module that the property names
        engine = build_hf_engine(...)
    adapter.convert(model)              # GroupedExperts of AutoEP, in place

Needs DeepSpeed: ``pip install "multigemm[deepspeed]"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..accelerator import get_accelerator
from ..moe._choice import PROPERTY
from ._grouped import sorted_experts
from ._optional import require

NAME = "multigemm_moe"
"""The module's name in ``DSMoERegistry``."""
DEFAULT = "cutlass_multi_gemm_moe"
"""DeepSpeed's own, which is taken where the property says nothing."""


def _require(module: str) -> Any:
    return require(f"deepspeed.{module}", "deepspeed")


def register() -> str:
    """Put ``DSMultigemmMoE`` into ``DSMoERegistry`` under its name, and return that. Doing so twice is once.

    Raises ``ImportError`` where DeepSpeed is absent or has no inference engine of version 2.
    """
    _require("inference.v2.modules.interfaces")
    from ._deepspeed_module import DSMoERegistry, DSMultigemmMoE

    DSMoERegistry.register_module(DSMultigemmMoE)
    return NAME


def get_property(key: str, accelerator: Any = None) -> str | None:
    """What multigemm has to say about an accelerator of DeepSpeed, by default the current one.

    For "multi_gemm_moe" the name of the module to take, "multigemm_moe", where multigemm's accelerator of
    that device prefers one of its own implementations: where a backend has code for the device. Else, and
    for every other key, None: no preference.
    """
    if key != PROPERTY:
        return None
    found = accelerator or _require("accelerator").get_accelerator()
    return NAME if get_accelerator(found.current_device_name()).get_property(PROPERTY) else None


def extend_accelerator(accelerator: Any = None) -> Any:
    """Give DeepSpeed's current accelerator (or the one given) a ``get_property``, make it current, return it.

    It stays what it is, of a subclass with this one method more. Where its class has the method already,
    that is asked first.
    """
    module = _require("accelerator")
    found = accelerator or module.get_accelerator()
    if not getattr(type(found), "_multigemm", False):
        kind = type(found)
        before = getattr(kind, "get_property", None)

        def answer(self: Any, key: str) -> str | None:
            theirs: str | None = None if before is None else before(self, key)
            return get_property(key, self) if theirs is None else theirs

        subclass = type(kind.__name__, (kind,), {"get_property": answer, "_multigemm": True})
        extended: Any = object.__new__(subclass)
        extended.__dict__.update(vars(found))
        found = extended
    module.set_accelerator(found)
    return found


def instantiate_moe(moe_config: Any, engine_config: Any = None, *, name: str | None = None) -> Any:
    """Make the mixture-of-experts module of a model, as DeepSpeed's ``heuristics.instantiate_moe`` does.

    Of the module called ``name``, else of the one that the accelerator's property "multi_gemm_moe" names,
    else of DeepSpeed's default. The property is a preference: where its module does not support the
    configuration, the default is taken. Raises what ``DSMoERegistry.instantiate_config`` does.
    """
    register()
    registry = _require("inference.v2.modules.interfaces").DSMoERegistry
    bundle = _require("inference.v2.modules.module_registry").ConfigBundle
    if name is None:
        accelerator = _require("accelerator").get_accelerator()
        answer = getattr(accelerator, "get_property", lambda key: get_property(key, accelerator))(PROPERTY)
        supported = answer in registry.registry and registry.registry[answer].supports_config(moe_config)
        name = answer if supported else DEFAULT
    options = {"weight_dtype": moe_config.input_dtype}
    return registry.instantiate_config(bundle(name=name, config=moe_config, implementation_config=options))


@contextmanager
def chosen_by_property(name: str | None = None) -> Iterator[None]:
    """Let DeepSpeed's models that are made inside the ``with`` block choose by ``instantiate_moe``.

    DeepSpeed's own heuristic names its CUTLASS module on every device; it is put back at the end.
    """
    heuristics = _require("inference.v2.modules.heuristics")
    before = heuristics.instantiate_moe

    def choose(moe_config: Any, engine_config: Any = None) -> Any:
        return instantiate_moe(moe_config, engine_config, name=name)

    heuristics.instantiate_moe = choose
    try:
        yield
    finally:
        heuristics.instantiate_moe = before


def convert(model: nn.Module) -> int:
    """Let every ``GroupedExperts`` of DeepSpeed's AutoEP in a model compute with multigemm, in place.

    The modules stay what and where they are, with parameters and hooks; they are of a subclass afterwards.
    Returns their number.
    """
    theirs = _require("moe.ep_experts").GroupedExperts
    found = [m for m in model.modules() if type(m) is theirs]
    for module in found:
        module.__class__ = type("GroupedExperts", (theirs,), {"forward": _forward})
    return len(found)


def _forward(self: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
    def gate(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        if self.activation == "swiglu":
            return F.silu(g) * u
        entry = _require("moe.ep_experts").get_expert_activation(self.activation)
        y: torch.Tensor = entry.fn(g, u, self.activation_alpha, self.activation_limit)
        return y

    return sorted_experts(x, (self.w1, self.w2, self.w3), num_tokens_per_expert, gate, x.dtype)


def __getattr__(name: str) -> Any:
    if name == "DSMultigemmMoE":
        _require("inference.v2.modules.interfaces")
        from ._deepspeed_module import DSMultigemmMoE

        return DSMultigemmMoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
