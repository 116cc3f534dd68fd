"""What the rest of the front holds of an opened backend."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Backend:
    """An opened backend.

    ``info`` is its backend.json, ``query`` what the loaded library says of itself, ``handle`` the library
    for calls through ctypes. ``disabled`` names the features that are off, each with the reason: an older
    vendor library lacks a function that the feature needs.
    """

    name: str
    kind: str
    version: str
    folder: str
    library: str
    info: Mapping[str, Any] = field(repr=False)
    query: Mapping[str, Any] = field(repr=False)
    handle: ctypes.CDLL = field(repr=False, compare=False)
    disabled: Mapping[str, str] = field(default_factory=dict)
