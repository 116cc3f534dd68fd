"""What the checks of wheels' machine code share: the library to look into, and the command."""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def core(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], Path] | None]:
    """A wheel's backend.json and its core library, unpacked; None where the wheel is of another kind."""
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        package = path.name.split("-")[0]
        info = json.loads(wheel.read(f"{package}/backend.json"))
        found = info["kind"] == kind
        yield (info, Path(wheel.extract(f"{package}/{info['core']}", folder))) if found else None


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a check: wheels."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    return made


def report(wheels: Sequence[Path], check: Callable[[Path], Iterable[str]]) -> int:
    """Print every finding; the exit status."""
    found = [f"{path.name}: {line}" for path in wheels for line in check(path)]
    for line in found:
        print(line)
    return 1 if found else 0
