"""What is installed: the backends' metadata and PyTorch's version, read from files.

No backend's code runs here, no library is opened, and PyTorch is not imported. The scan costs tens of
milliseconds (importlib.metadata and one small file for each distribution), so it happens on first need.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ._selection import Candidate, Torch
from ._versions import same_release

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

GROUP = "multigemm.backends"
PROTOCOL = 1

# Fields of backend.json under protocol 1, and the reader of each.
_SHAPE: dict[str, str] = {
    "abi": "int",
    "version": "str",
    "name": "str",
    "kind": "str",
    "major": "int or null",
    "min_torch": "version",
    "min_blas": "int or null",
    "library": "str",
    "needed": "list of objects",
    "optional_symbols": "list of objects",
}
_ENTRY_FIELDS = {"needed": ("soname", "distribution", "folder"), "optional_symbols": ("symbol", "feature")}


def front_version() -> str:
    """Return this package's version; the generated constant, as importlib.metadata costs far more."""
    from ._version import __version__

    return str(__version__)


def torch_facts() -> Torch | None:
    """Return PyTorch's version and flavour, or None when it is not installed or cannot be read.

    Asks the imported module if there is one; otherwise reads its version file without importing it.
    """
    loaded = sys.modules.get("torch")
    version = getattr(loaded, "version", None)
    if version is not None and hasattr(version, "__version__"):
        values: Mapping[str, Any] = vars(version)
    else:
        values = _version_file("torch")
    try:
        return Torch.of(str(values["__version__"]), values.get("cuda"), values.get("hip"))
    except (KeyError, ValueError, TypeError):
        return None


def _version_file(package: str) -> dict[str, Any]:
    """Return the constants of ``package/version.py`` (or of its ``__init__``) without running it."""
    import ast
    import importlib.util

    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return {}
    if spec is None:
        return {}
    for folder in spec.submodule_search_locations or ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as stream:
                tree = ast.parse(stream.read())
        except (OSError, SyntaxError, ValueError):
            continue
        values: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            else:
                continue
            if isinstance(value, ast.Constant):
                values.update({t.id: value.value for t in targets if isinstance(t, ast.Name)})
        return values
    return {}


def installed() -> tuple[Candidate, ...]:
    """Return every installed backend, in the order of ``sys.path``; one that cannot be read says why.

    All distributions are looked at, not only the first of each name, since the second copy of a backend
    in another folder is just what has to be noticed.
    """
    found: list[Candidate] = []
    seen: set[tuple[str, str, str]] = set()
    for distribution, entry in _entry_points():
        candidate = entry if isinstance(entry, Candidate) else _read(distribution, entry)
        # One folder may be on the path twice, or be reached through a link (lib64 -> lib).
        key = (candidate.name, os.path.realpath(candidate.place), candidate.version)
        if key not in seen:
            seen.add(key)
            found.append(candidate)
    return tuple(_drop_stale_records(found))


def _drop_stale_records(found: list[Candidate]) -> Iterator[Candidate]:
    """Leave out a stale record that shares its folder with a sound one: both describe one package."""
    sound = {(c.name, os.path.realpath(c.place)) for c in found if c.error is None}
    for candidate in found:
        if candidate.error is None or (candidate.name, os.path.realpath(candidate.place)) not in sound:
            yield candidate


def _entry_points() -> Iterator[tuple[Distribution, EntryPoint | Candidate]]:
    """Yield what every distribution announces; a backend whose own record is unreadable as a candidate."""
    from importlib.metadata import distributions

    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt")
            if not text or GROUP not in text:
                continue
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:
            # Any package's record may be damaged; only a damaged backend is our business.
            record = str(getattr(distribution, "_path", ""))
            ours = re.match(r"multigemm[_-](\w+?)-([^-]+)\.dist-info$", os.path.basename(record))
            if ours:
                name, version = ours.groups()
                reason = f"its entry points cannot be read: {error}"
                yield distribution, Candidate(name, f"multigemm-{name}", version, None, None, reason, record)
            continue
        for entry in entries:
            yield distribution, entry


def _read(distribution: Distribution, entry: EntryPoint) -> Candidate:
    """Return the candidate that one entry point announces."""
    name = entry.name
    try:
        owner, version = str(distribution.metadata["Name"]), str(distribution.version)
    except Exception:
        owner, version = f"multigemm-{name}", "unknown"
    record = str(getattr(distribution, "_path", "") or "")
    module = entry.value.partition(":")[0].strip()

    def broken(reason: str, folder: str | None) -> Candidate:
        return Candidate(name, owner, version, folder, None, reason, record)

    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
        return broken(f"its entry point names no module: {entry.value!r}", None)
    try:
        folder = os.path.abspath(str(distribution.locate_file(module.replace(".", "/"))))
    except Exception as error:
        return broken(f"its folder cannot be located: {error}", None)
    if not os.path.isdir(folder):
        return broken(
            f"the package {module} is not there, only its metadata in {record} (a stale record)", None
        )
    path = os.path.join(folder, "backend.json")
    try:
        with open(path, encoding="utf-8") as stream:
            info = json.load(stream)
    except FileNotFoundError:
        return broken(f"{path} is missing", folder)
    except (OSError, ValueError) as error:
        return broken(f"{path} cannot be read: {error}", folder)
    wrong = check_info(info, name, version)
    # The description stays with a refused candidate: its kind and major tell which device it is for.
    kept = info if isinstance(info, dict) else None
    reason = f"{path}: {wrong}" if wrong is not None else None
    if kept is not None and reason is None and kept["protocol"] == PROTOCOL:
        for field in ("core", "library"):
            library = os.path.join(folder, *str(kept.get(field) or kept["library"]).split("/"))
            if not os.path.isfile(library):
                reason = f"its library {library} is missing"
    return Candidate(name, owner, version, folder, kept, reason, record)


def check_info(info: Any, name: str, version: str) -> str | None:
    """Return what is wrong with a parsed backend.json, or None.

    ``name`` and ``version`` are those of the entry point and the distribution, which have to agree with
    the file: a difference means that files of two installations are mixed. A file of another protocol
    is not looked into, as its fields may mean something else.
    """
    if not isinstance(info, dict):
        return "it is not an object"
    protocol = info.get("protocol")
    if not _is("int", protocol):
        return f"field 'protocol' is {protocol!r}, not an integer"
    if protocol != PROTOCOL:
        return None
    for field, shape in _SHAPE.items():
        if field not in info:
            return f"field {field!r} is missing"
        if not _is(shape, info[field]):
            return f"field {field!r} is {info[field]!r}, not {shape}"
    for field, keys in _ENTRY_FIELDS.items():
        for entry in info[field]:
            for key in keys:
                if not isinstance(entry.get(key), str):
                    return f"an entry of {field!r} has no text {key!r}: {entry!r}"
    if not isinstance(info.get("core", ""), str):
        return f"field 'core' is {info['core']!r}, not str"
    parts = [
        info["library"],
        info.get("core", ""),
        *(part for e in info["needed"] for part in (e["soname"], e["folder"])),
    ]
    for part in parts:
        if part.startswith("/") or ".." in part.split("/"):
            return f"{part!r} leads out of the installation"
    if info["name"] != name:
        return f"it names backend {info['name']!r}, but the entry point says {name!r}"
    if not same_release(info["version"], version):
        return f"it says version {info['version']}, but the installed distribution says {version}"
    return None


def _is(shape: str, value: Any) -> bool:
    if shape == "str":
        return isinstance(value, str)
    if shape == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if shape == "int or null":
        return value is None or _is("int", value)
    if shape == "version":
        return isinstance(value, list) and bool(value) and all(_is("int", part) for part in value)
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
