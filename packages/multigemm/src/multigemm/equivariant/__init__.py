"""Layers of equivariant networks, built from the public operators.

``IndexedLinear`` is a linear map over irreps with weights of its own for each element, and
``SymmetricContraction`` MACE's product of many-body features. Irreps are text,
such as "128x0e + 128x1o", or the objects of e3nn and cuEquivariance; neither package is needed.
"""

from ._contraction import SymmetricContraction as SymmetricContraction
from ._irreps import Irrep as Irrep
from ._irreps import Irreps as Irreps
from ._linear import IndexedLinear as IndexedLinear

__all__ = ["IndexedLinear", "Irrep", "Irreps", "SymmetricContraction"]
