"""From a resolved call to the code that computes it: the reference, a backend's leaf or a third party.

The same function serves both operators, so a derivative is routed as the product it came from.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _choice, _dispatch, _precision, _reference
from .._dispatch import Backend
from .._errors import BackendError, NativeError, native_failure
from ..accelerator import get_accelerator

_AS_IT_IS = contextlib.nullcontext()
_BY_BACKEND = frozenset(("", "torch", *_choice.NATIVE))


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
    native = of_backend(op, leaf, device, name)
    if native is not None:
        return native
    found = route(op, device, name)
    if found.kind == "reference":
        function: Callable[..., None] = getattr(_reference, op)
        return function
    third: Callable[..., None] = getattr(_choice.third_party(found.choice.name), op)
    return third


def of_backend(
    op: str, leaf: Callable[..., None], device: torch.device, name: str
) -> Callable[..., None] | None:
    """The same where a backend computes it, with any leaf that ends in precision, kernel; None elsewhere."""
    if name or not _choice.environment():
        # The way of nearly every call, without the words that `route` finds for `explain`.
        kernel = name or get_accelerator(device).get_property(op) or ""
        if kernel in _BY_BACKEND and _dispatch.backend_for(device.type) is not None:
            return _native(op, leaf, kernel)
    found = route(op, device, name)
    return _native(op, leaf, found.choice.name) if found.kind == "backend" else None


def _native(op: str, leaf: Callable[..., None], kernel: str) -> Callable[..., None]:
    def call(x: torch.Tensor, *others: Any) -> None:
        *operands, asked = others
        precision = _precision.resolved(x, asked)
        # The products of the implementation "torch" are PyTorch's, which knows its flags alone.
        holding = _precision.held(x, precision) if kernel == "torch" else _AS_IT_IS
        try:
            with holding:
                leaf(x, *operands, precision, kernel)
        except RuntimeError as error:
            failure = _failure(op, str(error), (x, *others))
            if failure is None:
                raise
            raise failure from error

    return call


# What the binding of a backend says: the status, its text, and in brackets device, stream and shapes.
_TOLD = re.compile(r"multigemm: \w+ failed with (MG_\w+): (.*) \(device (\S+), stream (\w+); ", re.DOTALL)


def _failure(op: str, text: str, arguments: tuple[Any, ...]) -> BackendError | NativeError | None:
    """The error class of a backend's failure; None for another's, such as PyTorch's own out of memory."""
    told = _TOLD.search(text)
    if told is None:
        return None
    status, cause, device, stream = told.groups()
    names = ("x", "w") if op == "grouped_mm" else ("x", "gy")
    return native_failure(
        op,
        f"{status}: {cause}",
        device=device,
        stream=None if stream == "none" else int(stream, 0),
        shapes={name: tuple(operand.shape) for name, operand in zip(names, arguments, strict=False)},
    )
