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
    package = module.partition(".")[0]
    install = f'python -m pip install "multigemm[{extra}]"'
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"multigemm.integrations.{extra} needs {package}, which is not installed: {install}"
        ) from error
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(
            f"multigemm.integrations.{extra}: {package} {_version(package)} has no {error.name}; "
            f"another version of it is needed: {install}"
        ) from error


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no known version"
