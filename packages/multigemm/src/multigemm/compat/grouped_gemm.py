"""The call of the ``grouped_gemm`` package: ``gmm(a, b, batch_sizes, trans_b=False)``.

A program that wrote ``from grouped_gemm import ops`` writes ``from multigemm.compat.grouped_gemm import
ops``. Any dtype of multigemm, any device, sizes on the device or the host, derivatives of any order.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .._errors import ShapeError
from ..ops import grouped_mm, grouped_mm_wgrad


def gmm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    trans_b: bool = False,
    *,
    trans_a: bool = False,
) -> torch.Tensor:
    """Grouped product of row blocks.

    Args:
        a: [N, K], rows in group order.
        b: [G, K, M], or [G, M, K] where ``trans_b``; with ``trans_a``, [N, M].
        batch_sizes: [G] integers, the rows of each group.
        trans_b: multiply with the transposed matrices.
        trans_a: multiply the transposed blocks of ``a`` with the blocks of ``b``.

    Returns:
        [N, M], or [G, K, M] where ``trans_a``.

    Raises:
        As ``multigemm.grouped_mm``; ShapeError where both transpositions are asked for.
    """
    if trans_a and trans_b:
        raise ShapeError("gmm: trans_a and trans_b exclude each other.")
    if trans_a:
        return grouped_mm_wgrad(a, b, batch_sizes)
    return grouped_mm(a, b.mT if trans_b else b, batch_sizes)


ops = SimpleNamespace(gmm=gmm)

__all__ = ["gmm", "ops"]
