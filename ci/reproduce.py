"""Compare two builds of one wheel or sdist, byte by byte: `python ci/reproduce.py FIRST SECOND`.

A line for each difference; exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path


def members(archive: Path) -> dict[str, tuple[str, tuple[object, ...]]]:
    """Of each member, in the order of the archive, a digest of its bytes and what else is written of it."""
    found: dict[str, tuple[str, tuple[object, ...]]] = {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for item in wheel.infolist():
                digest = hashlib.sha256(wheel.read(item)).hexdigest()
                found[item.filename] = (
                    digest,
                    (item.date_time, oct(item.external_attr >> 16), item.compress_type),
                )
    else:
        with tarfile.open(archive) as sdist:
            for entry in sdist:
                data = sdist.extractfile(entry)
                digest = hashlib.sha256(data.read() if data else b"").hexdigest()
                found[entry.name] = digest, (entry.mtime, oct(entry.mode), entry.uid, entry.gid)
    return found


def differences(first: Path, second: Path) -> Iterator[str]:
    """What differs."""
    if first.name != second.name:
        yield f"the names differ: {first.name} and {second.name}"
    if first.read_bytes() == second.read_bytes():
        return
    one, other = members(first), members(second)
    for name in sorted(set(one) ^ set(other)):
        yield f"{name} is in one of the two only"
    told = False
    for name in (n for n in one if n in other):
        if one[name][0] != other[name][0]:
            told = True
            yield f"{name}: other bytes"
        if one[name][1] != other[name][1]:
            told = True
            yield f"{name}: {one[name][1]} and {other[name][1]}"
    if [n for n in one if n in other] != [n for n in other if n in one]:
        told = True
        yield "the members come in another order"
    if not told and not set(one) ^ set(other):
        yield "the archives differ, but no member does"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    found = list(differences(options.first, options.second))
    for line in found:
        print(f"{options.first.name}: {line}")
    if not found:
        digest = hashlib.sha256(options.first.read_bytes()).hexdigest()
        print(f"{options.first.name}: two builds gave the same bytes, sha256 {digest}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
