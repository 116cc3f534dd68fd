"""Frameworks that need not be installed."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import a framework's module.

    Raises ``ImportError`` that names the extra where the framework is absent, and its version where it is
    there and lacks the module. Whatever else goes wrong inside the framework is raised as it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise
        install = f'python -m pip install "multigemm[{extra}]"'
        if error.name == package:
            raise ImportError(
                f"multigemm.integrations.{extra} needs {package}, which is not installed: {install}"
            ) from error
        raise ImportError(
            f"multigemm.integrations.{extra}: {package} {metadata.version(package)} has no {error.name}; "
            f"another version of it is needed: {install}"
        ) from error
