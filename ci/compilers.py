"""What compiles native wheels, and what of it this machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a CUDA wheel is built with, beside the headers of CUTLASS. No wheel has an nvcc of CUDA 12: where the
# machine has none either, these compile in its place.
CUDA_PACKAGES = {
    "CUDA 12": (
        "nvidia-cublas-cu12",
        "nvidia-cuda-cccl-cu12",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-cuda-nvrtc-cu12",
        "nvidia-cuda-runtime-cu12",
        "nvidia-nvfatbin-cu12",
    ),
    "CUDA 13": ("nvidia-cublas",),
}


def missing(backend: Mapping[str, Any]) -> str:
    """Return which compiler a row of ci/matrix.toml needs that this machine lacks, or nothing.

    In CI only those count that .ci/run may fail to install.
    """
    if backend["kind"] == "rocm":
        return missing_hip()
    if backend["toolkit"] == "CUDA 12":
        return missing_cuda_12()
    if os.environ.get("CI"):
        return ""
    if not any(shutil.which(c) for c in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return "no C++ compiler was found"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    if backend["kind"] == "cuda" and not shutil.which(os.environ.get("CUDACXX", "nvcc")):
        return "" if toolkit.exists() else "no nvcc was found"
    return ""


def missing_cuda_12() -> str:
    """Return what is lacking for CUDA 12: its nvcc, or a clang for the host's half of what NVRTC compiles."""
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is not None and "release 12." in told([nvcc, "--version"]):
        return ""
    if any(shutil.which(c) for c in (os.environ.get("MULTIGEMM_CUDA_CLANG"), "clang++-19", "clang++") if c):
        return ""
    return "neither nvcc 12 nor a clang was found: Debian's clang-19 brings one"


def missing_hip() -> str:
    """Return what the compiler of kernels for AMD lacks here, or nothing."""
    given = os.environ.get("MULTIGEMM_HIP_COMPILER", "")
    compiler = shutil.which(given or "clang++-19") or shutil.which("amdclang++", path="/opt/rocm/bin")
    hint = "Debian's clang-19, clang-tools-19 and lld-19 bring it"
    if compiler is None:
        return f"no clang for AMD GPUs was found: {hint}"
    for program in ("lld", "clang-offload-bundler"):
        if not Path(told([compiler, f"-print-prog-name={program}"]).strip()).is_absolute():
            return f"{compiler} has no {program}: {hint}"
    return ""


def told(command: list[str]) -> str:
    """What a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
