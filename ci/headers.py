"""Unpack the headers of packages, without installing them: `python ci/headers.py FOLDER PACKAGE...`.

A native wheel is compiled with the headers of PyTorch and CUTLASS, whose wheels would bring gigabytes more
of what they require. The versions are those of ci/constraints.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PINS = Path(__file__).resolve().parent / "constraints.txt"
ENDINGS = (".h", ".hpp", ".cuh", ".inl")


def is_header(name: str) -> bool:
    """Tell whether a member of a wheel is a header, or the licence that it is under."""
    return name.endswith(ENDINGS) or ".dist-info/" in name


def unpack(wheel: Path, folder: Path) -> int:
    """Unpack the headers of one wheel; return how many."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if is_header(name)]
        archive.extractall(folder, names)
    return sum(name.endswith(ENDINGS) for name in names)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="+")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as downloads:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-c",
            str(PINS),
            "-d",
            downloads,
        ]
        subprocess.run([*command, *options.packages], check=True)
        for wheel in sorted(Path(downloads).glob("*.whl")):
            count = unpack(wheel, options.folder)
            print(f"{wheel.name}: {count} headers into {options.folder}")
            if not count:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
