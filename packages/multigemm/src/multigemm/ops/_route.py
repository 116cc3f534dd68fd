"""From a resolved call to the code that computes it: the reference, a backend's leaf or a third party.

The same function serves both operators, so a derivative is routed as the product it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import _choice, _dispatch, _reference
from .._dispatch import Backend


class Route(NamedTuple):
    """Where a call goes: ``kind`` is "reference", "backend" or "third party"."""

    kind: str
    choice: _choice.Choice
    backend: Backend | None = None


def route(op: str, device: torch.device, name: str, context: str = "") -> Route:
    choice = _choice.resolve(name, context, op, device)
    if choice.name == "reference":
        return Route("reference", choice)
    if choice.name in ("", "torch") or choice.name in _choice.NATIVE:
        backend = _dispatch.backend_for(device.type)
        if backend is not None:
            return Route("backend", choice, backend)
        if _choice.needs_backend(choice.name):
            raise _choice.no_backend(op, choice.name, device.type)
        return Route("reference", choice)
    _choice.known(choice.name, f"{op}: {choice.source}")
    return Route("third party", choice)


def implementation(
    op: str, leaf: Callable[..., None], device: torch.device, name: str
) -> Callable[..., None]:
    """The function to call with ``(*operands, out, precision)``."""
    found = route(op, device, name)
    if found.kind == "backend":
        kernel = found.choice.name
        return lambda *arguments: leaf(*arguments, kernel)
    if found.kind == "reference":
        function: Callable[..., None] = getattr(_reference, op)
        return function
    third: Callable[..., None] = getattr(_choice.third_party(found.choice.name), op)
    return third
