"""The weights of a symmetric contraction, with MACE's names, and what MACE's state dicts have beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._cache import Place
from ._terms import Setting, couplings

_NUMBERS = ("0", "1")
"""Names of the weights of lower degrees, in their list."""


class Contraction(nn.Module):
    """The weights of one output: ``weights_max`` [G, P, C] of the highest degree, then ``weights`` by falling
    degree.

    In a state dict stand also MACE's ``U_matrix_*`` and ``weights_*_zeroed``. They are made for it, and
    compared with it when it is loaded, but never kept.
    """

    def __init__(
        self, setting: Setting, which: int, num_elements: int, num_features: int, like: dict[str, Any]
    ) -> None:
        super().__init__()
        self.irreps_in, self.irrep_out = setting.irreps_in, setting.irreps_out[which]
        self.correlation, self.reduced = setting.correlation[which], setting.reduced
        made = []
        for nu in range(self.correlation, 0, -1):
            basis = self.basis(nu)
            shape = (num_elements, basis.shape[-1], num_features)
            possible = bool(basis.any())
            # A degree that cannot give this irrep has a weight too, as in MACE, and it is zero for good.
            weight = torch.randn(shape, **like) / basis.shape[-1] if possible else torch.zeros(shape, **like)
            made.append(nn.Parameter(weight, requires_grad=possible))
        self.weights_max = made[0]
        self.weights = nn.ParameterList(made[1:])

    def basis(self, nu: int) -> torch.Tensor:
        """[2L+1, D, .., D, P] float64."""
        return couplings(self.irreps_in, self.irrep_out, nu, self.reduced)

    def all_weights(self) -> list[nn.Parameter]:
        """By falling degree."""
        if not torch.compiler.is_compiling():
            # From where they lie: a module takes microseconds to find each. Parametrized ones lie elsewhere.
            rest = self._modules["weights"]._parameters  # type: ignore[union-attr]
            found = [self._parameters.get("weights_max"), *map(rest.get, _NUMBERS[: self.correlation - 1])]
            for w in found:
                if w is None:
                    break
            else:
                return found
        return [self.weights_max, *(self.weights[i] for i in range(len(self.weights)))]

    def places(self) -> list[Place]:
        """Where the weights lie; what is found there leads to all of them, unless they are parametrized."""
        rest: Any = self._modules["weights"]
        found: list[Place] = [(self._modules, "weights", rest)]
        found += [(self._parameters, name, w) for name, w in self._parameters.items()]
        return found + [(rest._parameters, name, w) for name, w in rest._parameters.items()]

    def _derived(self) -> dict[str, torch.Tensor]:
        like = self.weights_max
        result = {}
        for nu in range(1, self.correlation + 1):
            basis = self.basis(nu)
            zeroed = torch.tensor(not bool(basis.any()), device=like.device)
            u = basis.squeeze(0) if basis.shape[0] == 1 else basis
            result[f"U_matrix_{nu}"] = u.to(like)
            result["weights_max_zeroed" if nu == self.correlation else f"weights_{nu - 1}_zeroed"] = zeroed
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._derived().items():
            destination[prefix + name] = value

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        errors = arguments[-1]
        for name, mine in self._derived().items():
            given = state_dict.pop(prefix + name, None)
            if not name.startswith("U_") or given is None:
                continue
            if given.shape != mine.shape or not torch.allclose(
                given.double().cpu(), mine.double().cpu(), atol=1e-4
            ):
                errors.append(
                    f"{prefix}{name} {list(given.shape)} is not the coupling of this module "
                    f"{list(mine.shape)}: its weights are of another basis, use_reduced_cg is "
                    f"{self.reduced} here."
                )
        super()._load_from_state_dict(state_dict, prefix, *arguments)
