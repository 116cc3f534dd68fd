"""What the weights stand for: the coefficients of the terms, kept while they can't change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..ops import GroupOrder


def traced() -> bool:
    """Whether torch.compile or a transform of torch.func looks on: then nothing is read and nothing kept."""
    if torch.compiler.is_compiling():
        return True
    functorch = torch._C._functorch.peek_interpreter_stack
    return functorch() is not None or torch._C._len_torch_dispatch_stack() > 0


def _capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a graph, in which nothing can be read back."""
    asked = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    if asked is None:
        return False
    with torch.accelerator.device_index(device.index):  # it asks for the current device's
        return bool(asked())


def present(order: GroupOrder) -> torch.Tensor | None:
    """The elements that have atoms, or None for all; reads the sizes, which synchronises with a GPU."""
    sizes = order.group_sizes
    if traced() or sizes.device.type == "meta" or (sizes.device.type != "cpu" and _capturing(sizes.device)):
        return None
    found = sizes.nonzero().squeeze(1)
    return None if found.shape[0] == sizes.shape[0] else found


Place = tuple[dict[str, Any], str, object]
"""What a module has under a name: a dict of its parameters or modules, the name, and the thing itself."""


class Kept:
    """One value derived from weights, as long as they are frozen and unchanged. Not copied, not pickled."""

    def __init__(self) -> None:
        self._entry: tuple[Any, torch.Tensor] | None = None
        self._watched: tuple[list[Place], list[tuple[nn.Parameter, int, int]], torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_entry": None, "_watched": None}

    def unchanged(self) -> torch.Tensor | None:
        """The value that ``get`` gave where ``watch`` was told of its weights: a few words for each of them,
        where ``get`` takes as long as launching a kernel. None where anything may have changed."""
        watched = self._watched
        if watched is None:
            return None
        places, weights, value = watched
        for things, name, thing in places:
            if things.get(name) is not thing:
                return None
        for w, version, address in weights:
            if w.requires_grad or w._version != version or w.data_ptr() != address:
                return None
        return value

    def watch(self, where: Callable[[], list[Place]]) -> None:
        """Let ``unchanged`` answer for what is kept, if anything is: the places lead to every weight."""
        entry = self._entry
        if entry is None or self._watched is not None or traced():
            return
        places = where()
        weights = [thing for _, _, thing in places if isinstance(thing, nn.Parameter)]
        self._watched = (places, [(w, w._version, w.data_ptr()) for w in weights], entry[1])

    def get(self, weights: list[nn.Parameter], detail: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``make()``, or what it gave for the same frozen weights and ``detail`` last time.

        An in-place change of a weight is noticed by its version, which ``weight.data.copy_`` alone passes by.
        """
        if traced():
            return make()
        for w in weights:
            if w.requires_grad or type(w) is not nn.Parameter or w.is_inference():
                self._entry = self._watched = None
                return make()
        first = weights[0]
        places = [w.data_ptr() for w in weights]
        key = (detail, places, [w._version for w in weights], first.dtype, first.device)
        entry = self._entry
        if entry is not None and entry[0] == key:
            return entry[1]
        with torch.inference_mode(False), torch.no_grad():
            value = make()
        self._entry, self._watched = (key, value), None
        return value


def coefficients(
    weights: list[list[nn.Parameter]], tables: list[torch.Tensor], elements: torch.Tensor | None
) -> torch.Tensor:
    """[G', T, C]: the coefficients of all outputs' terms, or of the independent ones among them, of all
    elements or of the given ones.

    ``weights`` has for each output its [G, P, C] by falling degree, ``tables`` its [T_o, P_o].
    """
    parts = []
    for own, table in zip(weights, tables, strict=True):
        w = torch.cat(list(own), 1) if len(own) > 1 else own[0]
        if elements is not None:
            w = w.index_select(0, elements)
        parts.append(table @ w)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]
