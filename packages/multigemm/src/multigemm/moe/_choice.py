"""Which implementation of the layer is asked for. The user's word comes first:

argument > ``use`` (context) > ``MULTIGEMM_MOE_IMPLEMENTATION`` (environment) > the accelerator's property
"multi_gemm_moe" > the default, "pytorch_multi_gemm_moe".
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._choice import Choice, pick
from ..accelerator import get_accelerator

PROPERTY = "multi_gemm_moe"
DEFAULT = "pytorch_multi_gemm_moe"
VARIABLE = "MULTIGEMM_MOE_IMPLEMENTATION"
USER = ("argument", "context", "environment")
"""Sources that are a user's word."""

_pinned: contextvars.ContextVar[str] = contextvars.ContextVar("multigemm_moe_implementation", default="")


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Pin the implementation of every layer computed inside the ``with`` block, in this thread.

    ``name`` is that of a registered implementation; ``None`` lifts an outer pin. A name given to the layer
    or to the call wins over the pin. ``torch.compile`` reads the pin when it traces. Raises
    ``OptionError`` for a name that nobody provides.
    """
    from ._registry import registry

    if name is not None:
        registry.get(name)
    token = _pinned.set(name or "")
    try:
        yield
    finally:
        _pinned.reset(token)


def resolve(argument: str | None, device: torch.device) -> Choice:
    """The name that is asked for, and what asked for it. The accelerator is asked last."""
    context = _pinned.get()
    environment = "" if argument or context else os.environ.get(VARIABLE, "")
    preference = None
    if not (argument or context or environment):
        preference = get_accelerator(device).get_property(PROPERTY)
    choice = pick(argument or "", context, environment, preference)
    return choice if choice.name else Choice(DEFAULT, "default")
