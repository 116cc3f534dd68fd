"""Collect what a release has in one folder, and say what it is.

    python ci/release.py collect [--repair] --out FOLDER WHEEL_OR_SDIST...
    python ci/release.py finish --out FOLDER

Wheels are taken as cibuildwheel left them; --repair gives those of a plain build the manylinux tag that they
can have, and nothing else: no library is grafted in. finish writes SHA256SUMS and multigemm.cdx.json.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from generate import read_matrix, read_version
from generate_wheels import excludes

SUMS, BILL = "SHA256SUMS", "multigemm.cdx.json"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of `nox -s release`."""
    parser = argparse.ArgumentParser("nox -s release --", description="Rehearse a release, or collect one.")
    parser.add_argument(
        "--wheels", metavar="FOLDER", help="with wheels that cibuildwheel built; builds nothing"
    )
    parser.add_argument("--published", action="store_true", help="ask of them what a release has")
    parser.add_argument("--quick", action="store_true", help="neither the install matrix nor second builds")
    parser.add_argument("--all-tests", action="store_true", help="the whole suite, not a selection")
    return parser.parse_args(arguments)


def repair(wheel: Path, backend: str, out: Path) -> None:
    """Give a wheel its manylinux tag; fail where a library would be grafted in."""
    matrix = read_matrix()
    (row,) = (row for row in matrix["backend"] if row["name"] == backend)
    tool = Path(sys.executable).parent
    command = [
        str(tool / "auditwheel"),
        "repair",
        "--only-plat",
        "--plat",
        matrix["local"]["platform"],
        "-w",
        str(out),
    ]
    for pattern in excludes(matrix, row):
        command += ["--exclude", pattern]
    environment = {**os.environ, "PATH": f"{tool}{os.pathsep}{os.environ['PATH']}"}  # where patchelf is
    done = subprocess.run(
        [*command, str(wheel)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{wheel.name} cannot be repaired:\n{done.stdout}{done.stderr}")


def collect(files: Sequence[Path], out: Path, repaired: bool) -> list[str]:
    """Fill the folder of a release with these files; return their names there."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    matrix, version = read_matrix(), read_version()
    native = {row["import_name"]: row["name"] for row in matrix["backend"]}
    for file in files:
        package, told = file.name.removesuffix(".tar.gz").split("-")[:2]
        if told != version:
            raise SystemExit(f"{file.name} is not of {version}, as shared/version.txt is")
        if package in native and not repaired:
            repair(file, native[package], out)
        else:
            shutil.copy2(file, out)
    return sorted(file.name for file in out.iterdir())


def sums(folder: Path) -> str:
    """The checksums of a folder's files, as `sha256sum --check` reads them."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def finish(folder: Path) -> None:
    """Write the bill of materials and the checksums of a folder."""
    from sbom import main as write_bill  # which needs CycloneDX's library

    write_bill(["--out", str(folder / BILL), *map(str, sorted(folder.glob("*.whl")))])
    (folder / SUMS).write_text(sums(folder), encoding="utf-8")
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:>12} {file.name}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    first, last = steps.add_parser("collect"), steps.add_parser("finish")
    first.add_argument("--repair", action="store_true", help="give plain builds their manylinux tag")
    first.add_argument("files", nargs="+", type=Path, metavar="WHEEL_OR_SDIST")
    for step in (first, last):
        step.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args(arguments)
    if given.step == "collect":
        print("\n".join(collect(given.files, given.out, not given.repair)))
    else:
        finish(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
