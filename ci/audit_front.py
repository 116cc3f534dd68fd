"""Check the front's wheel and sdist as a stranger would.

    python ci/audit_front.py dist/multigemm-VERSION-py3-none-any.whl

The sdist is looked for beside the wheel. Every finding is a line; the exit status is 1 when there is one.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from generate import ROOT, read_matrix, read_version
from packaging.requirements import Requirement

SIZE_LIMIT = 1 << 20


def contents(wheel: Path) -> list[str]:
    """Return what is wrong with the files of the wheel."""
    source = ROOT / "packages" / "multigemm" / "src"
    expected = {
        str(f.relative_to(source))
        for f in (source / "multigemm").rglob("*")
        if f.is_file()
        and not any(part.startswith(".") or part == "__pycache__" for part in f.relative_to(source).parts)
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
        size = sum(i.file_size for i in archive.infolist())
    metadata = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    found = [f"a file of the source is missing: {n}" for n in sorted(expected - names)]
    found += [f"a file that is not in the source: {n}" for n in sorted(names - metadata - expected)]
    if not any(n.endswith("/licenses/LICENSE") for n in metadata):
        found.append("the licence is missing")
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append(f"the tag has to be py3-none-any: {wheel.name}")
    if size > SIZE_LIMIT:
        found.append(f"{size} bytes unpacked; a pure front stays under {SIZE_LIMIT}")
    return found


def requirements(metadata: Message) -> list[str]:
    """Return what is wrong with the version, the requirements and the extras."""
    matrix, version, found = read_matrix(), read_version(), []
    if metadata["Version"] != version:
        found.append(f"version {metadata['Version']}, shared/version.txt has {version}")
    required = [Requirement(r) for r in metadata.get_all("Requires-Dist") or []]
    always = {r.name: r for r in required if r.marker is None}
    floor = ".".join(map(str, matrix["front"]["min_torch"]))
    if "torch" not in always or str(always["torch"].specifier) != f">={floor}":
        found.append(f"torch has to be required as torch>={floor}, without an upper bound")
    for name in sorted(always):
        if name.startswith(("multigemm", "nvidia", "rocm", "cupy")):
            found.append(f"{name} is required; backends and vendors' libraries come by extras only")
    backends = {b["name"]: f"{b['distribution']}=={version}" for b in matrix["backend"]}
    for r in required:
        if r.marker is not None and r.name.startswith("multigemm-"):
            backend = next((n for n in backends if r.marker.evaluate({"extra": n})), None)
            if backend is None:
                found.append(f"an extra asks for {r.name}, which ci/matrix.toml does not build")
    for name, requirement in backends.items():
        given = [
            f"{r.name}{r.specifier}"
            for r in required
            if r.marker is not None and r.marker.evaluate({"extra": name})
        ]
        if given != [requirement]:
            found.append(f"extra {name} asks for {given}, it has to be [{requirement!r}]")
    return found


def sdist(wheel: Path) -> list[str]:
    """Return what is wrong with the sdist beside the wheel."""
    archives = list(wheel.parent.glob("multigemm-*.tar.gz"))
    if len(archives) != 1:
        return [f"expected one sdist beside {wheel.name}, found {len(archives)}"]
    with tarfile.open(archives[0]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    needed = ("pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "src/multigemm/__init__.py")
    found = [f"the sdist lacks {n}" for n in needed if n not in names]
    return found + [f"the sdist carries {n}" for n in sorted(names) if "/." in f"/{n}" and n != ".gitignore"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    found = contents(wheel) + requirements(metadata) + sdist(wheel)
    for line in found:
        print(f"{wheel.name}: {line}")
    if not found:
        print(f"{wheel.name}: contents, requirements, extras and sdist are as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
