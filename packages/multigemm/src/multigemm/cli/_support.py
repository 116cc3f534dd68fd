"""What several commands share: a clear end of the program, missing extras, names of devices."""

from __future__ import annotations

import importlib
import platform
from types import ModuleType

import torch
import typer


def stop(message: str, code: int = 2) -> typer.Exit:
    """Print one sentence to stderr; raise the result."""
    typer.echo(message, err=True)
    return typer.Exit(code)


def require(module: str, extra: str, what: str) -> ModuleType:
    """Import ``module``, or end the program with the one command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise stop(
            f"{what} needs {top}, which cannot be imported here ({error}); "
            f'install it with: python -m pip install "multigemm[{extra}]"'
        ) from None


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def torch_flavour() -> str:
    """What torch was built for: "CUDA 13.0", "ROCm 7.1" or "CPU"."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "CPU"
