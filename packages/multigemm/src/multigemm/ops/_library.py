"""The operator library. Schemas are defined here and in the operator files, never by native code.

Two native libraries that both define a schema abort the process, so a backend only registers kernels
for the ``native_*`` leaf operators below. A leaf writes every element of ``out``, which its caller
allocated uninitialised on the operands' device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

LIB = torch.library.Library("multigemm", "DEF")

LIB.define(
    "native_grouped_mm(Tensor x, Tensor w, Tensor groups, bool offsets, Tensor? bias, "
    "Tensor(a!) out, str precision, str implementation) -> ()"
)
LIB.define(
    "native_grouped_mm_wgrad(Tensor x, Tensor gy, Tensor groups, bool offsets, bool sum_batch, "
    "Tensor(a!) out, str precision, str implementation) -> ()"
)

_MOE_ACTIVATION = "int k, int kind, bool gated, bool interleaved, float alpha, float limit"
LIB.define(
    "native_moe_route(Tensor? logits, Tensor? correction, Tensor(a!) experts, Tensor(b!)? weights, "
    "Tensor(c!) permutation, Tensor(d!) inverse, Tensor(e!) ends, Tensor? x, Tensor(f!)? rows, int score, "
    "bool renormalize, int groups, int top_groups, int group_score, float scale) -> ()"
)
LIB.define(
    "native_moe_route_backward(Tensor grad_weights, Tensor logits, Tensor experts, Tensor(a!) out, "
    "int score, bool renormalize, float scale) -> ()"
)
LIB.define(
    "native_moe_spread(Tensor x, Tensor inverse, Tensor ends, Tensor? weights, Tensor? other, "
    "Tensor(a!)? out, Tensor(b!)? dots, int k) -> ()"
)
LIB.define(
    "native_moe_collect(Tensor rows, Tensor inverse, Tensor ends, Tensor? weights, Tensor? other, "
    "Tensor(a!) out, int k) -> ()"
)
LIB.define(
    "native_moe_activate(Tensor h, Tensor permutation, Tensor ends, Tensor? weights, Tensor(a!) out, "
    f"{_MOE_ACTIVATION}) -> ()"
)
LIB.define(
    "native_moe_up(Tensor x, Tensor w, Tensor ends, Tensor? bias, Tensor? permutation, Tensor? inverse, "
    f"Tensor(a!) out, {_MOE_ACTIVATION}, str precision, str implementation) -> ()"
)
LIB.define(
    "native_moe_up_reads_tokens(Tensor x, Tensor w, Tensor ends, Tensor? bias, int k, bool gated, "
    "bool interleaved, str precision, str implementation) -> bool"
)
LIB.define(
    "native_moe_activate_backward(Tensor grad, Tensor h, Tensor permutation, Tensor ends, Tensor? weights, "
    f"Tensor(a!) grad_h, Tensor(b!)? grad_weights, Tensor(c!)? out, {_MOE_ACTIVATION}) -> ()"
)

AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "privateuseone": "AutocastPrivateUse1",
}


def register_fake(operator: str, function: Callable[..., Any]) -> None:
    """``torch.library.register_fake`` without its search for the caller's source file and module.

    The search takes longer than the whole rest of this package's import; the public call is what remains
    should torch move its registry.
    """
    try:
        entry = torch._library.simple_registry.singleton.find(f"multigemm::{operator}")
        handle = entry.fake_impl.register(function, __name__, lib=LIB, allow_override=False)
    except (AttributeError, TypeError):
        torch.library.register_fake(f"multigemm::{operator}", function, lib=LIB)
    else:
        LIB._registration_handles.append(handle)


def grad_needed(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def forward_mode() -> bool:
    """Whether forward-mode differentiation goes on; without it, nothing is kept for tangents."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether forward-mode differentiation carries a tangent of one of these through the call."""
    if not forward_mode():
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def saved_for_tangents(ctx: Any) -> tuple[Any, ...]:
    """What ``save_for_forward`` kept, without the tangents of the level that is being computed."""
    saved = ctx.saved_for_forward
    return tuple(None if t is None else forward_ad.unpack_dual(t).primal for t in saved)


def outer_tangents() -> contextlib.AbstractContextManager[Any]:
    """Lets outer levels of forward mode see the products of a ``jvp``, inside of which PyTorch disables them:
    the mixed second derivative of a product would be lost."""
    mode: contextlib.AbstractContextManager[Any] = forward_ad._set_fwd_grad_enabled(True)
    return mode


def sum_of(terms: list[torch.Tensor]) -> torch.Tensor | None:
    """The sum of the parts of a tangent; None where there are none."""
    return sum(terms[1:], terms[0]) if terms else None


_AnyFunction = TypeVar("_AnyFunction", bound=type[torch.autograd.Function])


def signed(function: _AnyFunction) -> _AnyFunction:
    """Keep the signature of a function's ``forward``: ``apply`` asks for it at every call, and finding it
    takes longer than all the rest of a call on a few rows."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


class Function(_SingleLevelFunction):
    """An autograd function that records one level of differentiation: the operators' Autograd kernels.

    ``torch.autograd.Function`` refuses to run below the dispatcher inside ``torch.func`` transforms.
    There a kernel differentiates one level, as torch's own kernels do, and the dispatcher brings the
    other levels to it. So the operators themselves work under ``torch.func`` and in graphs of
    ``torch.compile`` that contain such transforms.
    """

    operator: ClassVar[Callable[..., torch.Tensor]]
    """The operator whose kernel this is."""

    @classmethod
    def run(cls, *arguments: Any) -> torch.Tensor:
        """The kernel: differentiates, or passes on where no gradient is needed."""
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if not grad_needed(*tensors) and not has_tangent(*tensors):
            with torch._C._AutoDispatchBelowAutograd():
                return cls.operator(*arguments)
        return cls.record(*arguments)

    @classmethod
    def record(cls, *arguments: Any) -> torch.Tensor:
        """``forward``, with a node of the graph for its gradients."""
        with enable_single_level_autograd_function():
            result: torch.Tensor = cls.apply(*arguments)  # type: ignore[attr-defined]  # made in C++
        return result

    @classmethod
    def below(cls, *arguments: Any) -> torch.Tensor:
        """The operator without this level of differentiation. Gradients and tangents stay enabled, which
        ``forward`` would disable, because outer levels of ``torch.func`` are still to come."""
        with (
            torch.enable_grad(),
            forward_ad._set_fwd_grad_enabled(True),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            return cls.operator(*arguments)
