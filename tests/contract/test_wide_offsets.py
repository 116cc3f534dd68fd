"""Offsets past 2^31 elements in every operand, without the memory: strides that long over untouched pages.

The failure: index times stride in 32 bits, an illegal access or another row's values.
https://github.com/pytorch/torchtitan/issues/1932 https://github.com/deepspeedai/DeepSpeed/pull/8261
https://github.com/vllm-project/vllm/pull/34279
"""

from __future__ import annotations

import torch

import multigemm

STEP = 2**30 + 8  # two steps pass 2^31 elements


def far_apart(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values of ``shape`` whose first dimension has a stride of over 2^30 elements."""
    inner = torch.Size(shape[1:]).numel()
    storage = torch.empty((shape[0] - 1) * STEP + inner, dtype=torch.float16, device=device)
    strides = torch.empty(shape[1:]).stride()
    t = storage.as_strided(shape, (STEP, *strides))
    t.copy_(torch.randn(shape, device=device))
    return t


def test_x(pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    x = far_apart((4, 6), device)
    w = torch.randn(2, 6, 5, device=device).half()
    s = torch.tensor([1, 3], device=device)
    torch.testing.assert_close(multigemm.grouped_mm(x, w, s), multigemm.grouped_mm(x.contiguous(), w, s))
    dw = multigemm.grouped_mm_wgrad(x, x, s)
    torch.testing.assert_close(dw, multigemm.grouped_mm_wgrad(x.contiguous(), x.contiguous(), s))


def test_w(pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    w = far_apart((4, 6, 5), device)
    x = torch.randn(8, 6, device=device).half()
    s = torch.tensor([2, 0, 3, 3], device=device)
    torch.testing.assert_close(multigemm.grouped_mm(x, w, s), multigemm.grouped_mm(x, w.contiguous(), s))
    gy = torch.randn(8, 5, device=device).half()
    torch.testing.assert_close(
        multigemm.grouped_mm(gy, w.mT, s), multigemm.grouped_mm(gy, w.mT.contiguous(), s)
    )


def test_y_and_dw(pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, device=device).half(), torch.randn(4, 6, 5, device=device).half()
    s = torch.tensor([1, 1, 1, 1], device=device)
    y = far_apart((4, 5), device)
    multigemm.grouped_mm(x, w, s, out=y)
    torch.testing.assert_close(y.contiguous(), multigemm.grouped_mm(x, w, s))
    dw = far_apart((4, 6, 5), device)
    multigemm.grouped_mm_wgrad(x, y.contiguous(), s, out=dw)
    torch.testing.assert_close(dw.contiguous(), multigemm.grouped_mm_wgrad(x, y.contiguous(), s))
