"""Many matrix products of different heights in one call.

Importing this package defines the operators and nothing more: no native library is opened, no device
is touched and no package metadata is read until the first product is computed.
"""

from . import errors as errors
from ._choice import use as use
from ._version import __version__ as __version__
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
