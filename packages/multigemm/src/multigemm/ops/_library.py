"""The operator library. Schemas are defined here and in the operator files, never by native code.

Two native libraries that both define a schema abort the process, so a backend only registers kernels
for the ``native_*`` leaf operators below. A leaf writes every element of ``out``, which its caller
allocated uninitialised on the operands' device.
"""

from __future__ import annotations

import torch

LIB = torch.library.Library("multigemm", "DEF")

LIB.define(
    "native_grouped_mm(Tensor x, Tensor w, Tensor groups, bool offsets, Tensor? bias, "
    "Tensor(a!) out, str precision, str implementation) -> ()"
)
LIB.define(
    "native_grouped_mm_wgrad(Tensor x, Tensor gy, Tensor groups, bool offsets, bool sum_batch, "
    "Tensor(a!) out, str precision, str implementation) -> ()"
)

AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "privateuseone": "AutocastPrivateUse1",
}


def functorch_active() -> bool:
    """True inside ``torch.func`` transforms.

    There the autograd function must be applied in Python, above the dispatcher, because functorch
    lifts Python autograd functions and not autograd kernels of operators.
    """
    return torch._C._are_functorch_transforms_active()


def grad_needed(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
