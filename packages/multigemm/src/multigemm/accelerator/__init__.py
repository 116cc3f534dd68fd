"""What a device is and prefers, asked without naming its kind.

Core code never asks "is this CUDA": it asks the accelerator for a property, and a property that an
accelerator does not know is ``None``, in which case the caller's default holds.
"""

from ._base import Accelerator as Accelerator
from ._registry import get_accelerator as get_accelerator
from ._registry import register_accelerator as register_accelerator

__all__ = ["Accelerator", "get_accelerator", "register_accelerator"]
