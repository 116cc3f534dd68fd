"""Write what must agree with shared/version.txt and ci/matrix.toml.

    python ci/generate.py            write every stale file and name it
    python ci/generate.py --check    write nothing; one line for each stale file, and exit status 1

Generated are: the front's _version.py, the extras in its pyproject.toml, the support table of README.md, the
copy of LICENSE that each wheel carries, cibuildwheel's tables in the pyproject.toml of each backend, and the
workflows of .github/ from ci/templates/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import generate_wheels

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (
    "# generated from ci/matrix.toml by ci/generate.py: begin extras\n",
    "# end extras\n",
)
SUPPORT = (
    "<!-- generated from ci/matrix.toml by ci/generate.py: begin support -->\n",
    "<!-- end support -->\n",
)


def read_matrix(root: Path = ROOT) -> dict[str, Any]:
    """Return ci/matrix.toml as a dict."""
    return tomllib.loads((root / "ci" / "matrix.toml").read_text(encoding="utf-8"))


def read_version(root: Path = ROOT) -> str:
    """Return the one version of the project."""
    return (root / "shared" / "version.txt").read_text(encoding="utf-8").strip()


def version_module(version: str) -> str:
    """Return the text of the front's _version.py."""
    return f'# Generated from shared/version.txt by ci/generate.py; do not edit.\n__version__ = "{version}"\n'


def extras(matrix: Mapping[str, Any], version: str) -> str:
    """Return one extra for each backend, pinned to the front's version."""
    lines = [f'{b["name"]} = ["{b["distribution"]}=={version}"]\n' for b in matrix["backend"]]
    return "".join(lines)


def support_table(matrix: Mapping[str, Any]) -> str:
    """Return README's table of what runs where."""
    rows = [("Device", "What runs there", "Needs", "Tested")]
    names = {"cpu": "CPU", "cuda": "NVIDIA GPU", "rocm": "AMD GPU"}
    for backend in matrix["backend"]:
        architectures = ", ".join(backend["architectures"])
        toolkit = f", built for {backend['toolkit']}" if backend["toolkit"] else ""
        rows.append(
            (
                names[backend["kind"]],
                f"native kernels of `{backend['distribution']}` ({architectures})",
                f"PyTorch {_dotted(backend['min_torch'])} or newer{toolkit}",
                backend["tested"],
            )
        )
    floor = f"PyTorch {_dotted(matrix['front']['min_torch'])} or newer"
    rows.extend((r["device"], r["how"], floor, r["tested"]) for r in matrix["reference"])
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    lines.insert(1, "| --- " * len(rows[0]) + "|\n")
    return "".join(lines)


def between(text: str, markers: tuple[str, str], block: str, where: str) -> str:
    """Return the text with what stands between the two marker lines replaced."""
    begin, end = markers
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{where}: expected one line {begin.strip()!r} and after it one {end.strip()!r}")
    head, rest = text.split(begin)
    return head + begin + block + end + rest.split(end)[1]


def wanted(root: Path = ROOT) -> dict[str, str]:
    """Return every generated file, relative to the root, with the text it should have."""
    matrix, version = read_matrix(root), read_version(root)
    front = matrix["front"]["folder"]
    pyproject, readme = f"{front}/pyproject.toml", "README.md"
    files = {
        f"{front}/src/multigemm/_version.py": version_module(version),
        pyproject: between(_read(root / pyproject), EXTRAS, extras(matrix, version), pyproject),
        readme: between(_read(root / readme), SUPPORT, support_table(matrix), readme),
    }
    licence = _read(root / "LICENSE")
    for folder in [front, *(backend["folder"] for backend in matrix["backend"])]:
        files[f"{folder}/LICENSE"] = licence
    return files | generate_wheels.files(root, matrix)


def _dotted(version: list[int]) -> str:
    return ".".join(map(str, version))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is stale")
    check = parser.parse_args().check
    files = wanted()
    stale = {name: text for name, text in files.items() if _read(ROOT / name) != text}
    orphans = sorted(
        {f".github/workflows/{f.name}" for f in (ROOT / ".github" / "workflows").glob("*")} - set(files)
    )
    for name in orphans:
        print(f"{name} has no template in ci/templates/")
    for name, text in stale.items():
        if check:
            print(f"{name} is stale: run `python ci/generate.py`")
        else:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if orphans or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
