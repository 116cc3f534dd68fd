"""Test an installed backend under this Python without PyTorch: `python ci/wheel_test.py NAME`.

cibuildwheel runs it for every Python that a wheel serves, the install matrix for those that are there. The
wheel has to be found by its entry point, to open, to be of the front's ABI, and, where it needs no GPU, to
compute products of NumPy arrays.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def opened(info: dict[str, Any]) -> ctypes.CDLL:
    """Open the C ABI of a backend; what it needs is found by its RPATH alone."""
    return ctypes.CDLL(str(Path(info["folder"]) / info["core"]))


def check_library(info: dict[str, Any]) -> None:
    """The library is the one that backend.json describes, and its structs are the front's."""
    from multigemm import _abi

    handle, name = opened(info), info["name"]
    query = handle[f"mg_query_{name}"]
    query.restype = ctypes.c_char_p
    told = json.loads(query())
    for field in ("protocol", "abi", "version", "name", "kind"):
        if told[field] != info[field]:
            raise SystemExit(f"the library says {field} {told[field]!r}, backend.json {info[field]!r}")
    theirs = list(_abi.Library(handle, name).struct_sizes())
    ours = [ctypes.sizeof(struct) for struct in _abi.STRUCTS]
    if theirs != ours:
        raise SystemExit(f"the library's structs have sizes {theirs}, the front's {ours}")


def check_products() -> None:
    """Products of NumPy arrays, with an empty group and a row of none, in both floating dtypes."""
    from multigemm import interop

    generator = np.random.default_rng(0)
    sizes = [2, 0, 4]
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-13)):
        x, w = (generator.standard_normal(shape).astype(dtype) for shape in ((7, 5), (3, 5, 4)))
        wanted = np.concatenate([x[:2] @ w[0], x[2:6] @ w[2], np.zeros((1, 4), dtype)])
        given = interop.grouped_mm(x, w, sizes)
        if given.dtype != dtype or not np.allclose(given, wanted, rtol=tolerance, atol=tolerance):
            raise SystemExit(f"the product in {np.dtype(dtype)} is wrong: {given} instead of {wanted}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the backend")
    name = parser.parse_args(arguments).name
    entries = [e for e in metadata.entry_points(group="multigemm.backends") if e.name == name]
    if len(entries) != 1:
        raise SystemExit(f"found {len(entries)} entry points of a backend {name}")
    package = importlib.import_module(entries[0].value)
    info = package.describe()
    check_library(info)
    if info["kind"] == "cpu":
        check_products()
    done = "opened and computed" if info["kind"] == "cpu" else "opened"
    print(f"{name} {info['version']}: {done} under Python {platform.python_version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
