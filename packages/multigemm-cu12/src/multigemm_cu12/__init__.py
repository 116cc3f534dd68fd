"""What the CUDA 12 backend of multigemm is: data only. The front opens the library, whose launchers
(grouped_mm, grouped_mm_wgrad) take the call from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent


def describe() -> dict[str, Any]:
    """The contents of backend.json, and the package's own folder under "folder"."""
    info: dict[str, Any] = json.loads((_FOLDER / "backend.json").read_text(encoding="utf-8"))
    info["folder"] = str(_FOLDER)
    return info


__version__: str = describe()["version"]
