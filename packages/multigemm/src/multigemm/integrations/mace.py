"""MACE: ``accelerate(model)`` puts these layers in the place of a model's own.

    from multigemm.integrations.mace import accelerate
    model = accelerate(torch.load("MACE-OFF23_small.model", weights_only=False))

Replaced are the symmetric contractions of the product blocks and the skip products of the interaction blocks.
Energies, forces, stress and the gradients of a training step stay what they were, up to rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._errors import OptionError
from ..equivariant import IndexedLinear, SymmetricContraction
from . import _optional


class Replaced(NamedTuple):
    """The names of the modules that were replaced."""

    contractions: tuple[str, ...]
    skip_products: tuple[str, ...]


def accelerate(model: torch.nn.Module, implementation: str | None = None) -> torch.nn.Module:
    """Replace a MACE model's contractions and skip products, in place; returns the model.

    The weights are copied, with whether they require gradients. Optimisers made before hold the old ones, so
    make them afterwards. Parameters get other names where a skip product was (``weight`` [G, ..]);
    ``replaced`` of the result, a ``Replaced``, tells which modules those are.

    Args:
        model: a model of ``mace-torch`` whose contractions are e3nn's, not cuEquivariance's.
        implementation: of the contractions, "fused", "grouped" or None.

    Raises:
        ImportError: mace-torch is not installed.
        OptionError: the model has nothing to replace, or a contraction whose basis is not known.
    """
    theirs = _optional.require("mace.modules.symmetric_contraction", "mace").SymmetricContraction
    product = _optional.require(
        "e3nn.o3", "mace"
    ).FullyConnectedTensorProduct  # after mace, which prepares it
    contractions, products = [], []
    for name, module in list(model.named_modules()):
        mine: Any
        if isinstance(module, theirs):
            mine = SymmetricContraction.from_mace(module, implementation)
            contractions.append(name)
        elif isinstance(module, product) and name.rpartition(".")[2] == "skip_tp":
            mine = IndexedLinear.from_e3nn(module)
            products.append(name)
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, mine)
    if not contractions and not products:
        raise OptionError(
            f"accelerate: {type(model).__name__} has no symmetric contraction and no skip product of MACE's; "
            f"it may have been made for another backend already."
        )
    model.replaced = Replaced(tuple(contractions), tuple(products))  # type: ignore[assignment]  # a plain attribute
    return model
