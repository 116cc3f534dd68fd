"""Make libraries that stand in for a cuBLAS: `python ci/stand_in_blas.py WHEEL FOLDER`.

A wheel for one CUDA major links cuBLAS of that major. Where it is not installed, as beside a PyTorch for the
other major, the wheel's own kernels can still be run with these: they have the names and the functions that
the wheel needs, every one of which answers CUBLAS_STATUS_NOT_INITIALIZED. FOLDER becomes a folder for
PYTHONPATH, laid out as NVIDIA's wheels are. For tests alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from elf import Library

TEXT = "cublasGetStatusName"  # the one function whose answer is no status


def source(symbols: list[str]) -> str:
    """C text of the functions; none looks at its arguments."""
    lines = [f"int {symbol}(void) {{ return 1; }}" for symbol in symbols if symbol != TEXT]
    if TEXT in symbols:
        lines.append(f'const char *{TEXT}(void) {{ return "CUBLAS_STATUS_NOT_INITIALIZED"; }}')
    return "\n".join([*lines, ""])


def wanted(wheel: Path) -> tuple[dict[str, Any], list[str]]:
    """The backend.json of a wheel and the functions of cuBLAS that its library needs."""
    package = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        info = json.loads(archive.read(f"{package}/backend.json"))
        library = Library(Path(archive.extract(f"{package}/{info['core']}", folder)))
    return info, sorted(symbol for symbol in library.undefined if symbol.startswith("cublas"))


def compile_one(path: Path, soname: str, symbols: list[str]) -> None:
    """Compile one library with all the functions."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SystemExit("no C compiler was found")
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{soname}", "-o", str(path)]
    subprocess.run([compiler, *options], input=source(symbols), text=True, check=True)


def make(wheel: Path, folder: Path) -> list[Path]:
    """Compile every library of the wheel's `needed`; return where they are."""
    info, symbols = wanted(wheel)
    if not info["needed"] or not symbols:
        raise SystemExit(f"{wheel.name} needs nothing of cuBLAS")
    made = []
    for entry in info["needed"]:
        made.append(folder / entry["folder"] / entry["soname"])
        compile_one(made[-1], entry["soname"], symbols)
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    for path in make(options.wheel, options.folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
