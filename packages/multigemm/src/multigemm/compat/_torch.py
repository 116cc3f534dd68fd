"""The call of ``torch.nn.functional.grouped_mm``, in its four forms."""

from __future__ import annotations

import torch

from .._errors import GroupSizesError, ShapeError
from ..ops import grouped_mm as _grouped_mm
from ..ops import grouped_mm_wgrad


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Grouped product with torch's signature.

    ============ ============ ============= ======================================================
    mat_a        mat_b        result        ``offs`` [G] int32 or int64: cumulative ends along
    ============ ============ ============= ======================================================
    [N, K]       [G, K, M]    [N, M]        the rows of mat_a
    [K, N]       [N, M]       [G, K, M]     the inner dimension N
    [G, L, K]    [K, N]       [L, N]        the columns of mat_b
    [G, N, K]    [G, K, M]    [G, N, M]     (not used: a batched product)
    ============ ============ ============= ======================================================

    ``bias`` is added to the result: [M] or [G, M] where a group is a matrix of the result or a block of
    its rows, [N] where a group is a block of columns. ``out_dtype`` is the dtype of the result. Unlike
    torch's, the call takes any dtype of ``multigemm.grouped_mm``, any stride and alignment, and what lies
    past the last offset is zero. Raises as ``multigemm.grouped_mm`` does.
    """
    dims = (mat_a.dim(), mat_b.dim())
    if dims not in ((2, 3), (2, 2), (3, 2), (3, 3)):
        raise ShapeError(f"grouped_mm: mat_a and mat_b must be 2-D or 3-D, got {dims[0]}-D and {dims[1]}-D.")
    if dims == (3, 3):
        if offs is not None:
            raise GroupSizesError("grouped_mm: offs must be None where both matrices are 3-D.")
        return _batched(mat_a, mat_b, bias, out_dtype)
    if offs is None:
        raise GroupSizesError("grouped_mm: offs must be given unless both matrices are 3-D.")
    if dims == (2, 3):
        bias = _per_group(bias, mat_b.shape[0], mat_b.shape[-1])
        return _grouped_mm(mat_a, mat_b, offsets=offs, bias=bias, out_dtype=out_dtype)
    if dims == (2, 2):
        if mat_a.shape[1] != mat_b.shape[0]:
            raise ShapeError(
                f"grouped_mm: the inner sizes must agree, got mat_a {list(mat_a.shape)} "
                f"and mat_b {list(mat_b.shape)}."
            )
        y = grouped_mm_wgrad(mat_a.mT, mat_b, offsets=offs, out_dtype=out_dtype)
        bias = _per_group(bias, y.shape[0], y.shape[-1])
        return y if bias is None else (y + bias.unsqueeze(1)).to(y.dtype)
    y = _grouped_mm(mat_b.mT, mat_a.mT, offsets=offs, out_dtype=out_dtype).mT
    if bias is None:
        return y
    if bias.shape != (y.shape[-1],):
        raise ShapeError(f"grouped_mm: bias must have shape [{y.shape[-1]}], got {list(bias.shape)}.")
    return (y + bias).to(y.dtype)


def _batched(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """[G, N, K] by [G, K, M]: G groups of N rows each."""
    if a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"grouped_mm: mat_a and mat_b must have the same first size, got {list(a.shape)} "
            f"and {list(b.shape)}."
        )
    groups, height, inner = a.shape
    sizes = torch.full((groups,), height, dtype=torch.int64, device=a.device)
    bias = _per_group(bias, groups, b.shape[-1])
    y = _grouped_mm(a.reshape(groups * height, inner), b, sizes, bias=bias, out_dtype=out_dtype)
    return y.view(groups, height, b.shape[-1])


def _per_group(bias: torch.Tensor | None, groups: int, width: int) -> torch.Tensor | None:
    """[M] or [G, M] -> [G, M]."""
    if bias is None:
        return None
    if tuple(bias.shape) not in ((width,), (groups, width)):
        raise ShapeError(
            f"grouped_mm: bias must have shape [{width}] or [{groups}, {width}], got {list(bias.shape)}."
        )
    return bias.expand(groups, width)


__all__ = ["grouped_mm"]
