"""Which implementations there are, which of them a layer takes, and why not the others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .. import _plugins
from .._choice import Choice
from .._errors import OptionError
from ..accelerator import get_accelerator
from . import _choice
from ._config import ConfigBundle, MoEConfig
from ._experts import MultigemmMoE, PyTorchMoE
from ._implementation import MoEImplementation, Support
from ._native import NativeMoE

GROUP = "multigemm.moe_implementations"
"""Entry points by which a package adds an implementation under a name of its own."""

CHAIN = ("multigemm_moe", "pytorch_multi_gemm_moe")
"""What a refused choice falls along, from its own place on; the last computes everything anywhere."""

T = TypeVar("T", bound=type[MoEImplementation])
Device = torch.device | str | int | None


class Selection(NamedTuple):
    """The outcome of a choice."""

    name: str
    choice: Choice
    """The name that was asked for, and what asked for it."""
    refused: dict[str, str]
    """What came before ``name`` and was not taken, with the reason."""


def select(
    choice: Choice,
    supports: Callable[[str], Support],
    on_refusal: str | None,
    chain: Sequence[str],
) -> Selection:
    """The implementation that a choice leads to: data in, decision out.

    ``on_refusal`` is "raise", "fall_back", or None: raise where ``choice`` is a user's word. The chain is
    followed from the chosen name on, from its beginning where that is not in it. Raises ``OptionError``
    with every reason.
    """
    names = [choice.name]
    if on_refusal == "fall_back" or (on_refusal is None and choice.source not in _choice.USER):
        after = chain.index(choice.name) + 1 if choice.name in chain else 0
        names += chain[after:]
    refused: dict[str, str] = {}
    for name in names:
        support = supports(name)
        if support:
            return Selection(name, choice, refused)
        refused[name] = support.reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    hint = "" if len(names) > 1 else ' on_refusal="fall_back" would try the chain.'
    raise OptionError(
        f"multigemm.moe: no implementation takes this configuration, asked for {choice.name!r} "
        f"({choice.source}). {reasons}.{hint}"
    )


class MoEExplanation(NamedTuple):
    """What a layer takes. ``str()`` of it is text for people, ``as_dict()`` is data."""

    device: str
    accelerator: str
    capability: str | None
    """The accelerator's capability in its own terms, as text."""
    implementation: str
    """The implementation that computes the layer."""
    named: str
    """The name that was asked for."""
    source: str
    """What asked for it: "argument", "context", "environment", "property" or "default"."""
    chain: tuple[str, ...]
    reasons: dict[str, str]
    """Why each other implementation is not taken."""

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()

    def __str__(self) -> str:
        capability = f", capability {self.capability}" if self.capability is not None else ""
        lines = [
            f"mixture of experts on {self.device} ({self.accelerator}{capability}): {self.implementation}",
            f"  asked for: {self.named} ({self.source})",
            f"  chain: {', '.join(self.chain)}",
        ]
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.reasons.items())])


class _Instances:
    """Implementations that were made, as attributes: torch.compile reads those that are new."""


class MoERegistry:
    """Implementations by name.

    Holds the built-in ones and those of installed packages (entry points of the group
    ``multigemm.moe_implementations``), and takes others by ``register``. ``multigemm.moe.registry`` is the
    one that layers use.
    """

    def __init__(self, chain: Sequence[str] = CHAIN) -> None:
        self.chain = tuple(chain)
        """What a refused choice falls along, unless its bundle has a chain of its own."""
        self.instances = _Instances()
        self._lock = threading.RLock()
        self._registered: dict[str, type[MoEImplementation]] = {}
        self._keys: dict[tuple[Any, ...], str] = {}
        self._count = itertools.count()
        for built_in in (NativeMoE, MultigemmMoE, PyTorchMoE):
            self.register(built_in)

    def register(self, implementation: T, *, replace: bool = False) -> T:
        """Add an implementation under its ``name``; serves as a decorator too.

        It wins over an installed package's of the same name. Raises ``OptionError`` for what is no
        ``MoEImplementation``, has no name, or has one that was registered before, unless ``replace``.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, MoEImplementation)):
            raise OptionError(f"register: must be a subclass of MoEImplementation, got {implementation!r}.")
        name = implementation.name
        if not name:
            raise OptionError(f"register: {implementation.__name__} must have a name, got {name!r}.")
        with self._lock:
            if name in self._registered and not replace:
                raise OptionError(
                    f"register: {name!r} is registered already; pass replace=True to replace it."
                )
            self._registered[name] = implementation
            self._keys.clear()
        return implementation

    def names(self) -> tuple[str, ...]:
        """The names there are, in the order built-in, registered, installed."""
        return tuple(dict.fromkeys([*self._registered, *sorted(_plugins.names(GROUP))]))

    def get(self, name: str) -> type[MoEImplementation]:
        """The implementation of that name. Raises ``OptionError`` that lists the names there are."""
        if name in self._registered:
            return self._registered[name]
        if name in _plugins.names(GROUP):
            found = _plugins.load(GROUP, name)
            if isinstance(found, type) and issubclass(found, MoEImplementation):
                return found
            raise OptionError(
                f"{name!r} of the entry points {GROUP!r} must be a subclass of MoEImplementation, "
                f"got {found!r}."
            )
        raise OptionError(
            f"multigemm.moe: there is no implementation {name!r}; there are: {', '.join(self.names())}."
        )

    def supports_config(self, name: str, config: MoEConfig, device: Device = None) -> Support:
        """Whether the implementation ``name`` computes ``config`` on ``device``, and why not.

        ``device`` None is torch's current accelerator, the CPU where there is none. A name that nobody
        provides is not supported; nothing is raised.
        """
        try:
            implementation = self.get(name)
        except OptionError as error:
            return Support(False, str(error).rstrip("."))
        return implementation.supports_config(config, get_accelerator(device).device)

    def choose(self, bundle: ConfigBundle | MoEConfig, device: Device = None) -> Selection:
        """The implementation that a layer takes, by the order of precedence and then along the chain.

        Raises ``OptionError``: a user named one that does not exist, or no implementation is left.
        """
        bundle = bundle._bundle(None)
        where = get_accelerator(device).device
        choice = _choice.resolve(bundle.name, where)
        return self._select(bundle, where, choice)

    def _select(self, bundle: ConfigBundle, device: torch.device, choice: Choice) -> Selection:
        if choice.source in _choice.USER:
            self.get(choice.name)
        chain = self.chain if bundle.chain is None else bundle.chain
        return select(
            choice,
            lambda name: self.supports_config(name, bundle.config, device),
            bundle.on_refusal,
            chain,
        )

    def instantiate(self, bundle: ConfigBundle | MoEConfig, device: Device = None) -> MoEImplementation:
        """Make the implementation that ``choose`` leads to, for the bundle's configuration.

        Raises ``OptionError`` as ``choose`` does, and where ``implementation_config`` does not fit.
        """
        bundle = bundle._bundle(None)
        return self._make(bundle, self.choose(bundle, device))

    def _make(self, bundle: ConfigBundle, selection: Selection) -> MoEImplementation:
        options = bundle.implementation_config if selection.name == bundle.name else {}
        return self.get(selection.name)(bundle.config, options)

    def explain(self, bundle: ConfigBundle | MoEConfig, device: Device = None) -> MoEExplanation:
        """Tell which implementation a layer takes, and why not the others. Raises what ``choose`` does."""
        bundle = bundle._bundle(None)
        accelerator = get_accelerator(device)
        selection = self.choose(bundle, accelerator.device)
        reasons = dict(selection.refused)
        for name in self.names():
            if name != selection.name and name not in reasons:
                support = self.supports_config(name, bundle.config, accelerator.device)
                asked = f"{selection.choice.name!r} was asked for ({selection.choice.source})"
                reasons[name] = asked if support else support.reason
        capability = accelerator.capability()
        return MoEExplanation(
            str(accelerator.device),
            accelerator.name,
            None if capability is None else str(capability),
            selection.name,
            selection.choice.name,
            selection.choice.source,
            self.chain if bundle.chain is None else bundle.chain,
            reasons,
        )

    def key(self, bundle: ConfigBundle, device: torch.device, dtype: torch.dtype) -> str:
        """The attribute of ``instances`` that holds the implementation for tensors of that kind.

        The name is resolved at each call; all that follows from it is remembered.
        """
        choice = _choice.resolve(bundle.name, device)
        chain = self.chain if bundle.chain is None else bundle.chain
        config, options = bundle.config, bundle.implementation_config
        key = (config, device, dtype, choice, bundle.on_refusal, chain, _frozen(options))
        found = self._keys.get(key)
        if found is None:
            if config.input_dtype != dtype:  # the layer was converted since, or autocast is on
                config = config.model_copy(update={"input_dtype": dtype})
                bundle = bundle.model_copy(update={"config": config})
            made = self._make(bundle, self._select(bundle, device, choice))
            with self._lock:
                found = f"made_{next(self._count)}"
                setattr(self.instances, found, made)
                self._keys[key] = found
        return found


def _frozen(options: Mapping[str, Any]) -> str:
    return repr(sorted(options.items())) if options else ""


registry = MoERegistry()
