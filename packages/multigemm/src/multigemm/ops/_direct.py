"""Whether a call needs the dispatcher at all.

The dispatcher exists for what stands between a call and its kernel: autograd, autocast, ``torch.func``,
modes such as fake tensors, subclasses of tensors. Where there is none of it, which is the usual case of
inference, the kernel is called at once: that halves the host time of a call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._library import forward_mode

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")


def _questions() -> tuple[Callable[[], object], ...]:
    """What torch is asked, each without an argument and falsy where nothing stands in between."""
    functorch = torch._C._functorch.peek_interpreter_stack
    return (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, functorch)


try:
    _QUESTIONS: tuple[Callable[[], object], ...] | None = _questions()
except AttributeError:  # private names that a torch to come may lack: then every call is dispatched
    _QUESTIONS = None


def possible(x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether a call on these operands may go straight to its kernel."""
    if _QUESTIONS is None or forward_mode():
        return False
    kind = x.device.type
    if kind not in _DEVICES:  # meta tensors have no kernel; other devices may have keys of their own
        return False
    grad = torch.is_grad_enabled()
    for tensor in (x, other) if bias is None else (x, other, bias):
        if type(tensor) not in _PLAIN or (grad and tensor.requires_grad) or tensor.is_neg():
            return False
    for question in _QUESTIONS:
        if question():
            return False
    return not torch.is_autocast_enabled(kind)
