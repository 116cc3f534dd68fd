"""Check the wheels of one release against each other: `python ci/audit_set.py [--published] WHEEL...`.

A line for each finding; exit status 1 if there is any. Two wheels that share a file overwrite each other, and
removing one breaks the other (https://github.com/ai-dynamo/nixl/issues/1705). --published asks for all.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from generate import read_matrix, read_version


@dataclass(frozen=True)
class Wheel:
    """What one wheel installs."""

    name: str
    distribution: str
    version: str
    files: frozenset[str]
    commit: str  # of backend.json; "" for a wheel without one


def read(path: Path) -> Wheel:
    """Read a wheel's RECORD, which is what installers follow, and its backend.json."""
    package, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path) as wheel:
        record = wheel.read(f"{package}-{version}.dist-info/RECORD").decode()
        inside = f"{package}/backend.json" in wheel.namelist()
        commit = json.loads(wheel.read(f"{package}/backend.json"))["commit"] if inside else ""
    files = frozenset(row[0] for row in csv.reader(io.StringIO(record)) if row)
    return Wheel(path.name, package.replace("_", "-"), version, files, commit)


def findings(wheels: Sequence[Wheel], version: str, published: Sequence[str] = ()) -> Iterator[str]:
    """What is wrong with these wheels together; ``published`` are the distributions that have to be there."""
    for i, one in enumerate(wheels):
        if one.version != version:
            yield f"{one.name}: shared/version.txt has {version}"
        for other in wheels[i + 1 :]:
            for file in sorted(one.files & other.files):
                yield f"{one.name} and {other.name} both install {file}"
            if one.distribution == other.distribution:
                yield f"{one.name} and {other.name} are of one distribution"
    # Elsewhere a wheel whose sources did not change may be of an older commit than another.
    commits = {wheel.commit for wheel in wheels if wheel.commit} if published else set()
    if len(commits) > 1:
        yield f"the backends are of the commits {', '.join(sorted(commits))}"
    if "unknown" in commits:
        yield "a backend does not say which commit it is of"
    for name in sorted(set(published) - {wheel.distribution for wheel in wheels}):
        yield f"{name} is missing"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", action="store_true", help="ask for every package of ci/matrix.toml")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args(arguments)
    matrix = read_matrix()
    every = [p["distribution"] for p in (matrix["front"], *matrix["backend"])]
    wheels = [read(path) for path in options.wheels]
    found = list(findings(wheels, read_version(), every if options.published else ()))
    for line in found:
        print(line)
    if not found:
        print(f"{len(wheels)} wheels of {read_version()}: no file is shared")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
