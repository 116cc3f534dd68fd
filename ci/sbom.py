"""The software bill of materials of a release: `python ci/sbom.py --out FILE WHEEL...`, as CycloneDX 1.6.

Components are the wheels with their checksums, what each requires, and what is compiled into each without
being a file of its own: headers, and NVIDIA's static runtime. It is validated before it is written.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import sys
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from generate import ROOT, read_version
from packageurl import PackageURL
from packaging.requirements import Requirement

# Packages of ci/constraints.txt whose headers are compiled into a wheel, by kind of backend; their licences.
HEADERS: dict[str, dict[str, str]] = {
    "cpu": {"torch": "BSD-3-Clause"},
    "cuda": {"torch": "BSD-3-Clause", "nvidia-cutlass": "BSD-3-Clause"},
    "rocm": {"torch": "BSD-3-Clause"},
}


def pins() -> dict[str, str]:
    """The versions that a build uses."""
    text = (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def component(name: str, version: str | None, **fields: Any) -> Component:
    """A package of PyPI."""
    purl = PackageURL("pypi", None, name, version)
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, purl=purl, bom_ref=str(purl), **fields
    )


def compiled_in(info: Mapping[str, Any], versions: Mapping[str, str]) -> list[Component]:
    """What a backend holds of others without a file of its own."""
    found = [
        component(name, versions[name], licenses=[DisjunctiveLicense(id=licence)])
        for name, licence in HEADERS[info["kind"]].items()
    ]
    if info["kind"] == "cuda":
        version = (
            ".".join(map(str, info["toolkit"])) if isinstance(info["toolkit"], list) else info["toolkit"]
        )
        ref = f"cudart-static@{version}"
        licence = DisjunctiveLicense(name="NVIDIA CUDA Toolkit EULA")
        found.append(
            Component(
                name="CUDA runtime (static)",
                version=version,
                type=ComponentType.LIBRARY,
                bom_ref=ref,
                licenses=[licence],
            )
        )
    return found


def bill(wheels: Sequence[Path]) -> Bom:
    """The bill of materials of these wheels."""
    bom, version, versions = Bom(), read_version(), pins()
    known: dict[str, Component] = {}

    def once(made: Component) -> Component:
        return known.setdefault(str(made.bom_ref), made)

    release = Component(
        name="multigemm release", version=version, type=ComponentType.FRAMEWORK, bom_ref="release"
    )
    digests, ours = [], []
    for path in sorted(wheels):
        package = path.name.split("-")[0]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        digests.append(digest)
        with zipfile.ZipFile(path) as archive:
            metadata = message_from_bytes(archive.read(f"{package}-{version}.dist-info/METADATA"))
            described = f"{package}/backend.json"
            info = json.loads(archive.read(described)) if described in archive.namelist() else None
        if not metadata["License-Expression"]:
            raise SystemExit(f"{path.name}: METADATA has no License-Expression")
        wheel = component(
            metadata["Name"],
            version,
            licenses=[LicenseExpression(metadata["License-Expression"])],
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
            description=metadata["Summary"],
            properties=[Property(name="multigemm:file", value=path.name)],
        )
        if info is not None:
            facts = {"commit": info["commit"], "architectures": " ".join(info["architectures"])}
            facts |= {"abi": str(info["abi"]), "protocol": str(info["protocol"])}
            wheel.properties.update(Property(name=f"multigemm:{k}", value=v) for k, v in facts.items())
        wheel = once(wheel)
        ours.append(wheel)
        needs = [once(made) for made in compiled_in(info, versions)] if info else []
        for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
            if requirement.name.startswith("multigemm") or requirement.marker is not None:
                continue  # extras are a user's choice
            limits = [Property(name="multigemm:requires", value=str(requirement.specifier))]
            needs.append(
                once(component(requirement.name, None, scope=ComponentScope.REQUIRED, properties=limits))
            )
        bom.register_dependency(wheel, needs)
    bom.components.update(known.values())
    bom.metadata.component = release
    bom.register_dependency(release, ours)
    # The same wheels give the same file.
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, "multigemm:" + ":".join(digests))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return bom


def text_of(bom: Bom) -> str:
    """The bill as CycloneDX has it, or an error that says where it breaks the schema."""
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    if (fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise SystemExit(f"the bill of materials breaks CycloneDX's schema: {fault}")
    return text + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args(arguments)
    options.out.write_text(text_of(bill(options.wheels)), encoding="utf-8")
    print(f"wrote {options.out.name}: {len(options.wheels)} wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
