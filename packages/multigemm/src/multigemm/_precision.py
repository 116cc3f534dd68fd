"""How float32 is multiplied on a GPU: by the call's argument, else as torch's flags say.

The flags are ``torch.backends.cuda.matmul.fp32_precision`` and whatever sets it, such as ``allow_tf32``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def resolved(x: torch.Tensor, precision: str) -> str:
    """ "ieee" or "tf32" of a float32 product on a GPU; what was asked for, unread, of any other."""
    if precision or x.dtype != torch.float32 or x.device.type == "cpu":
        return precision
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@contextlib.contextmanager
def held(x: torch.Tensor, precision: str) -> Iterator[None]:
    """Hold torch's float32 matmul precision at ``precision`` on a GPU; the CPU has only the full one."""
    if x.dtype != torch.float32 or not precision or x.device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if before == precision:
        yield
        return
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before
