"""Environment variables that are read at every call.

``os.environ.get`` of a variable that is not set raises and catches inside, which takes longer than all
other choices of a call together; the mapping below it answers at once.
"""

from __future__ import annotations

import os
from typing import Any

# Bytes to bytes where the system's environment is bytes; read here and never written.
_data: Any = getattr(os.environ, "_data", None)
_CHECK, _IMPLEMENTATION = "MULTIGEMM_CHECK", "MULTIGEMM_IMPLEMENTATION"
_KEYS = {name: os.fsencode(name) for name in (_CHECK, _IMPLEMENTATION)}
_FAST = os.name == "posix" and isinstance(_data, dict)


def _get(name: str) -> str:
    if _FAST:
        value = _data.get(_KEYS[name])
        return os.fsdecode(value) if value else ""
    return os.environ.get(name, "")


def check() -> bool:
    """MULTIGEMM_CHECK: whether group sizes are read and refused where they are wrong."""
    return _get(_CHECK) not in ("", "0")


def implementation() -> str:
    """MULTIGEMM_IMPLEMENTATION, or ""."""
    return _get(_IMPLEMENTATION)
