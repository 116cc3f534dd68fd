"""Mixture-of-experts feed-forward layers, built from the public operators.

    y[t] = sum over the top-k experts e of token t of  p[t, e] * expert_e(x[t])

``MoEConfig`` says what is computed, ``MoEFeedForward`` and ``moe_feed_forward`` compute it, and ``registry``
says with which implementation. Needs pydantic, which ``pip install "multigemm[moe]"`` brings.
"""

try:
    import pydantic as _pydantic  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "pydantic":
        raise
    raise ImportError(
        "multigemm.moe needs pydantic, which is not installed: "
        'python -m pip install "multigemm[moe]". The operators of multigemm need none.'
    ) from _error

from ._checkpoint import LAYOUTS as LAYOUTS
from ._checkpoint import CheckpointLayout as CheckpointLayout
from ._checkpoint import read_checkpoint as read_checkpoint
from ._choice import use as use
from ._config import ConfigBundle as ConfigBundle
from ._config import MoEConfig as MoEConfig
from ._expert_parallel import ExpertParallelFeedForward as ExpertParallelFeedForward
from ._expert_parallel import expert_parallel as expert_parallel
from ._implementation import MoEImplementation as MoEImplementation
from ._implementation import Support as Support
from ._layer import MoEFeedForward as MoEFeedForward
from ._layer import moe_feed_forward as moe_feed_forward
from ._registry import MoERegistry as MoERegistry
from ._registry import registry as registry
from ._routing import Routing as Routing
from ._routing import route as route

__all__ = [
    "LAYOUTS",
    "CheckpointLayout",
    "ConfigBundle",
    "ExpertParallelFeedForward",
    "MoEConfig",
    "MoEFeedForward",
    "MoEImplementation",
    "MoERegistry",
    "Routing",
    "Support",
    "expert_parallel",
    "moe_feed_forward",
    "read_checkpoint",
    "registry",
    "route",
    "use",
]
