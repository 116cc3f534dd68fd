"""Which implementation computes a call. The user's word comes first:

argument > ``use`` (context) > ``MULTIGEMM_IMPLEMENTATION`` (environment) > the accelerator's property >
default, which is the backend where one serves the device and the torch reference elsewhere.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _environment, _plugins
from ._errors import NotInstalled, OptionError

if TYPE_CHECKING:
    import torch

NATIVE = ("native", "blas", "simt")
BUILT_IN = ("reference", "torch", *NATIVE)
GROUP = "multigemm.implementations"
"""Entry points by which a package adds an implementation under a name of its own."""

_pinned: contextvars.ContextVar[str] = contextvars.ContextVar("multigemm_implementation", default="")


class Choice(NamedTuple):
    """An implementation's name ("" is the default) and what named it."""

    name: str
    source: str


@contextmanager
def use(implementation: str | None) -> Iterator[None]:
    """Pin the implementation of every product made inside the ``with`` block, in this thread.

    ``implementation`` is "reference", "torch", "native", "blas", "simt" or the name of a third party's
    implementation; ``None`` lifts an outer pin. An argument at the call wins over the pin. The derivatives
    of a pinned product take the same implementation wherever they run. ``torch.compile`` reads the pin
    when it traces. Raises ``OptionError`` for a name that nobody provides.
    """
    name = "" if implementation is None else known(implementation, "use()")
    token = _pinned.set(name)
    try:
        yield
    finally:
        _pinned.reset(token)


def pinned() -> str:
    """The name pinned by ``use`` in this context, or ""."""
    return _pinned.get()


# torch.compile can't trace a ContextVar: it takes the value at tracing for a constant. This is what
# torch.compiler.assume_constant_result sets, without its import of the whole compiler (over a second).
pinned._dynamo_marked_constant = True  # type: ignore[attr-defined]


def known(name: str, source: str) -> str:
    """``name`` itself, or an ``OptionError`` that lists the names there are."""
    if name in BUILT_IN or name in _plugins.names(GROUP):
        return name
    names = ", ".join([*BUILT_IN, *sorted(_plugins.names(GROUP))])
    raise OptionError(f"{source}: there is no implementation {name!r}; there are: {names}.")


def pick(argument: str, context: str, environment: str, preference: str | None) -> Choice:
    """The first name given, by the order of precedence. A pure function."""
    for name, source in (
        (argument, "argument"),
        (context, "context"),
        (environment, "environment"),
        (preference, "property"),
    ):
        if name:
            return Choice(name, source)
    return Choice("", "default")


def environment() -> str:
    return _environment.implementation()


def resolve(argument: str, context: str, key: str, device: torch.device) -> Choice:
    """The choice for one call: ``key`` is the property asked of the accelerator (the operator's name)."""
    if argument or context:
        return pick(argument, context, "", None)
    env = environment()
    if env:
        return Choice(known(env, "MULTIGEMM_IMPLEMENTATION"), "environment")
    from .accelerator import get_accelerator

    return pick("", "", "", get_accelerator(device).get_property(key))


def needs_backend(name: str) -> bool:
    return name in NATIVE


def no_backend(op: str, name: str, device_type: str) -> NotInstalled:
    return NotInstalled(
        f"{op}: implementation {name!r} needs a native backend and none serves {device_type!r} here; "
        f'install one, for example python -m pip install "multigemm[cpu]", or use "reference". '
        f"`multigemm doctor` shows what was found and why it was refused.",
        device_type=device_type,
    )


def third_party(name: str) -> Any:
    """The implementation that an installed package provides under ``name``: an object with functions
    ``grouped_mm`` and ``grouped_mm_wgrad``, called as those of the reference are."""
    return _plugins.load(GROUP, name)
