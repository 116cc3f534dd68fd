"""Whether a call needs the dispatcher at all.

The dispatcher exists for what stands between a call and its kernel: autograd, autocast, ``torch.func``,
modes such as fake tensors, subclasses of tensors. Where there is none of it, which is the usual case of
inference, the kernel is called at once: that halves the host time of a call. Where autograd is all there
is, as in training, its node is recorded here, without the two ways through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._library import Function, forward_mode, grad_needed

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")


def _questions() -> tuple[Callable[[], object], ...]:
    """What torch is asked, each without an argument and falsy where nothing stands in between."""
    functorch = torch._C._functorch.peek_interpreter_stack
    return (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, functorch)


try:
    _QUESTIONS: tuple[Callable[[], object], ...] | None = _questions()
    _batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
except AttributeError:  # private names that a torch to come may lack: then every call is dispatched
    _QUESTIONS = None


class Ways(NamedTuple):
    """An operator, and what it comes down to: its kernel, and the function that records it."""

    operator: Callable[..., torch.Tensor]
    kernel: Callable[..., torch.Tensor]
    function: type[Function]


WAYS: dict[str, Ways] = {}


def ways(function: type[Function], kernel: Callable[..., torch.Tensor]) -> Ways:
    """Those of the operator that ``function`` records; a function like it calls the kernel at once."""
    made: Any = type(function)
    return Ways(
        function.operator,
        kernel,
        made(f"{function.__name__}Direct", (function,), {"forward": staticmethod(kernel)}),
    )


def product(op: str, x: torch.Tensor, other: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The operator ``op``, by the shortest way that this call allows."""
    ways = WAYS[op]
    bias = arguments[2] if op == "grouped_mm" else None
    if torch.compiler.is_compiling() or not plain(x, other, bias):
        return ways.operator(x, other, *arguments)
    if grad_needed(x, other, bias):
        return ways.function.record(x, other, *arguments)
    return ways.kernel(x, other, *arguments)


def call(op: str, operands: tuple[torch.Tensor | None, ...], arguments: tuple[Any, ...]) -> torch.Tensor:
    """The same for any operator: ``operands`` are those of its ``arguments`` that have gradients."""
    ways = WAYS[op]
    if torch.compiler.is_compiling() or not plain(*operands):
        return ways.operator(*arguments)
    if grad_needed(*operands):
        return ways.function.record(*arguments)
    return ways.kernel(*arguments)


def possible(x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether a call on these operands may go straight to its kernel."""
    return plain(x, other, bias) and not grad_needed(x, other, bias)


def plain(*operands: torch.Tensor | None) -> bool:
    """Whether nothing but autograd, reverse mode, can stand between a call and its kernel.

    The first operand is a tensor, whose device the kernel's is.
    """
    if _QUESTIONS is None or forward_mode():
        return False
    kind = operands[0].device.type  # type: ignore[union-attr]
    if kind not in _DEVICES:  # meta tensors have no kernel; other devices may have keys of their own
        return False
    for tensor in operands:
        if tensor is None:
            continue
        # The vmap of `is_grads_batched` is none of the questions below; its tensors tell.
        if type(tensor) not in _PLAIN or tensor.is_neg() or _batched(tensor):
            return False
    for question in _QUESTIONS:
        if question():
            return False
    return not torch.is_autocast_enabled(kind)
