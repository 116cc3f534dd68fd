"""What the audit of a native wheel reads in its metadata: tags, requirements, backend.json, RECORD.

Reports behind the checks: https://github.com/ACEsuit/mace/pull/1614 (metadata that allow older libraries than
the binaries need), https://github.com/InternLM/lmdeploy/issues/4116 (NVIDIA's names for CUDA 13 have no
suffix), https://github.com/WMD-group/SMACT/pull/654 (libraries that a backend has no business with).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from email import message_from_bytes
from email.message import Message
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import parse_tag

FIELDS = {
    "protocol": int,
    "abi": int,
    "version": str,
    "name": str,
    "kind": str,
    "min_torch": list,
    "architectures": list,
    "library": str,
    "core": str,
    "needed": list,
    "optional_symbols": list,
    "commit": str,
}


def audit_platform(platform: str, matrix: Mapping[str, Any], published: bool) -> Iterator[str]:
    """Findings about the platform's tag of a file name."""
    release, local = matrix["published"]["platform"], matrix["local"]["platform"]
    architecture = release.partition("manylinux_")[2].split("_", 2)[2]
    allowed = [release] if published else [f"linux_{architecture}", local, release]
    if platform not in allowed:
        yield f"is for the platform {platform}; ci/matrix.toml allows {', '.join(allowed)}"


def audit_info(info: dict[str, Any], version: str, matrix: Mapping[str, Any]) -> Iterator[str]:
    """Findings about backend.json."""
    for field, kind in FIELDS.items():
        if not isinstance(info.get(field), kind):
            yield f"backend.json: {field} is {info.get(field)!r}, not a {kind.__name__}"
    if info.get("version") != version:
        yield f"backend.json says version {info.get('version')}, the wheel {version}"
    rows = {row["name"]: row for row in matrix["backend"]}
    row = rows.get(str(info.get("name")))
    if row is None:
        yield f"backend.json: name is {info.get('name')!r}, ci/matrix.toml has {', '.join(rows)}"
    else:
        for field in ("kind", "min_torch"):
            if info.get(field) != row[field]:
                yield f"backend.json: {field} is {info.get(field)}, not {row[field]}"
    if info.get("without"):
        yield f"was built without its {', '.join(info['without'])}: such a build is for tests alone"
    commit = info.get("commit")
    if isinstance(commit, str) and not re.fullmatch(r"[0-9a-f]{40}|unknown", commit):
        yield f"backend.json: commit is {commit!r}, neither a hash nor 'unknown'"


def audit_architectures(info: dict[str, Any], row: Mapping[str, Any], published: bool) -> Iterator[str]:
    """Findings about the architectures that backend.json names; other audits compare with the code itself."""
    named, known = info["architectures"], row["architectures"]
    if published and named != known:
        yield f"backend.json names the architectures {named}, a release has {known}"
    for name in named:
        if name not in known:
            yield f"backend.json names the architecture {name}, which ci/matrix.toml does not"
    if not named:
        yield "backend.json names no architecture"


def audit_metadata(
    wheel: zipfile.ZipFile, stem: str, info: dict[str, Any], matrix: Mapping[str, Any]
) -> Iterator[str]:
    """Findings about everything in .dist-info of a wheel whose file name has this stem."""
    package, version, *tag = stem.split("-")
    folder, names = f"{package}-{version}.dist-info", set(wheel.namelist())
    for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt"):
        if f"{folder}/{name}" not in names:
            yield f"has no {folder}/{name}"
            return
    yield from audit_tags(message_from_bytes(wheel.read(f"{folder}/WHEEL")), "-".join(tag))
    metadata = message_from_bytes(wheel.read(f"{folder}/METADATA"))
    yield from audit_requirements(metadata, info)
    distribution = package.replace("_", "-")
    if (metadata["Name"], metadata["Version"]) != (distribution, version):
        yield f"METADATA is of {metadata['Name']} {metadata['Version']}, the file of {distribution} {version}"
    python = f">={'.'.join(map(str, matrix['front']['min_python']))}"
    if metadata["Requires-Python"] != python:
        yield f"requires Python {metadata['Requires-Python']}, all packages have to say {python}"
    for name in metadata.get_all("License-File") or ["LICENSE"]:
        if f"{folder}/licenses/{name}" not in names:
            yield f"lacks the licence {folder}/licenses/{name}"
    entries = ConfigParser(delimiters="=")
    entries.read_string(wheel.read(f"{folder}/entry_points.txt").decode())
    told = {section: dict(entries[section]) for section in entries.sections()}
    if told != {"multigemm.backends": {info["name"]: package}}:
        yield f"has the entry points {told}, not {info['name']} = {package} in multigemm.backends"
    yield from audit_record(wheel, f"{folder}/RECORD")


def audit_tags(told: Message, tag: str) -> Iterator[str]:
    """Findings about the file WHEEL, given the file name's tag."""
    tags = {str(t) for line in told.get_all("Tag") or [] for t in parse_tag(line)}
    if tags != {str(t) for t in parse_tag(tag)}:
        yield f"WHEEL has the tags {sorted(tags)}, the file name {tag}"
    if told["Root-Is-Purelib"] != "false":
        yield "WHEEL says that it is pure Python"


def audit_requirements(metadata: Message, info: dict[str, Any]) -> Iterator[str]:
    """Findings about what a backend requires: the libraries that it needs, from their floors on, no more."""
    required = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist") or [])}
    needed = {e["distribution"]: e for e in info["needed"] if not e["optional"]}
    if "torch" in required:
        yield "requires torch, which could replace a user's build of it"
    for name in sorted(set(required) - set(needed) - {"torch"}):
        yield f"requires {name}, of which backend.json needs no library"
    for name, entry in needed.items():
        if name not in required:
            yield f"does not require {name}, which brings {entry['soname']}"
        elif f">={entry['min_version']}" not in map(str, required[name].specifier):
            yield f"requires {required[name]}, backend.json needs {name} from {entry['min_version']} on"
        if re.fullmatch(r"nvidia-.*-cu1[3-9]", name):
            yield f"requires {name}: from CUDA 13 on NVIDIA's names have no suffix"


def audit_record(wheel: zipfile.ZipFile, record: str) -> Iterator[str]:
    """Findings about RECORD: every file there once, with its right hash."""
    rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
    listed = {row[0]: row[1] for row in rows}
    if len(listed) != len(rows):
        yield "RECORD lists a file twice"
    files = {name for name in wheel.namelist() if not name.endswith("/")}
    for name in sorted(files - set(listed)):
        yield f"RECORD lacks {name}"
    for name in sorted(set(listed) - files):
        yield f"RECORD has {name}, which is not in the wheel"
    for name in sorted(files & set(listed)):
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
        if name != record and listed[name] != f"sha256={digest}":
            yield f"RECORD has another hash for {name}"
