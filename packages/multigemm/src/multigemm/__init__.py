"""Many matrix products of different heights in one call.

Importing this package defines the operators and nothing more: no native library is opened, no device
is touched and no package metadata is read until the first product is computed.

Where PyTorch is not installed, only what needs none is here: ``errors``, ``use`` and ``multigemm.interop``.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import errors as errors
from ._choice import use as use
from ._version import __version__ as __version__

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise

    if not _TYPE_CHECKING:  # a type checker would take any name for granted

        def __getattr__(name: str) -> _Any:
            if name in __all__:
                raise ImportError(
                    f"multigemm.{name} needs PyTorch, which is not installed: python -m pip install "
                    '"torch>=2.10". multigemm.interop serves the arrays of other libraries without it.'
                )
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

else:
    from .accelerator import get_accelerator as get_accelerator
    from .accelerator import register_accelerator as register_accelerator
    from .explain import explain as explain
    from .ops import grouped_mm as grouped_mm
    from .ops import grouped_mm_wgrad as grouped_mm_wgrad
    from .ops import sort_by_group as sort_by_group

__all__ = [
    "__version__",
    "errors",
    "explain",
    "get_accelerator",
    "grouped_mm",
    "grouped_mm_wgrad",
    "register_accelerator",
    "sort_by_group",
    "use",
]
