"""What ci/generate.py writes for the building of wheels: cibuildwheel's tables and the workflows of .github/.

Everything follows from ci/matrix.toml; a workflow's steps are in ci/templates/, where <<name>> stands for a
value that is filled in as JSON, which is YAML too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARKERS = (
    "# generated from ci/matrix.toml by ci/generate.py: begin cibuildwheel\n",
    "# end cibuildwheel\n",
)
HEADERS = "/opt/headers"  # in the image; ci/matrix.toml names folders below it


def toolkit_of(matrix: Mapping[str, Any], backend: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a backend's toolkit."""
    known: dict[str, dict[str, Any]] = matrix["toolkit"]
    if backend["toolkit"] not in known:
        raise SystemExit(
            f"ci/matrix.toml: backend {backend['name']} names the toolkit {backend['toolkit']!r}, "
            f"which has no table; there are {', '.join(map(repr, known))}"
        )
    return known[backend["toolkit"]]


def interpreter_id(version: str) -> str:
    """Return CPython's version as tags have it: 3.14t is cp314t."""
    return f"cp{version.replace('.', '')}"


def tested_ids(matrix: Mapping[str, Any]) -> list[str]:
    """Return the Pythons that a wheel is tested under, by cibuildwheel's names; the first builds it."""
    python, platform = matrix["python"], matrix["published"]["platform"]
    if python["test"][0] != python["build"]:
        raise SystemExit("ci/matrix.toml: python.build has to be the first of python.test")
    architecture = platform.partition("manylinux_")[2].split("_", 2)[2]
    return [f"{interpreter_id(version)}-manylinux_{architecture}" for version in python["test"]]


def excludes(matrix: Mapping[str, Any], backend: Mapping[str, Any]) -> list[str]:
    """Return the patterns of libraries that the repair of a backend's wheel leaves out of it."""
    return [*matrix["published"]["exclude"], *toolkit_of(matrix, backend)["exclude"]]


def cibuildwheel_table(matrix: Mapping[str, Any], backend: Mapping[str, Any]) -> str:
    """Return [tool.cibuildwheel] of one backend's pyproject.toml."""
    toolkit = toolkit_of(matrix, backend)
    platform = matrix["published"]["platform"]
    architecture = platform.partition("manylinux_")[2].split("_", 2)[2]
    python = (
        f"/opt/python/{interpreter_id(matrix['python']['jobs'])}-{interpreter_id(matrix['python']['jobs'])}"
    )
    command = f"python {{project}}/ci/wheel_test.py {backend['name']}"
    headers = f"{python}/bin/python {{project}}/ci/headers.py {HEADERS} {' '.join(toolkit['headers'])}"
    left_out = " ".join(f"--exclude '{pattern}'" for pattern in excludes(matrix, backend))
    environment = {
        name: value.replace("{architectures}", ";".join(backend["architectures"]))
        for name, value in toolkit["environment"].items()
    }
    # Pins of the build alone: a Python that is tested may be older than the pins.
    environment["PIP_BUILD_CONSTRAINT"] = "/project/ci/build-constraints.txt"
    lines = [
        "[tool.cibuildwheel]",
        f"build = {_toml(tested_ids(matrix))}",
        f"archs = {_toml([architecture])}",
        'build-frontend = "pip"',
        f"before-test = {_toml('python -m pip install --no-deps {project}/packages/multigemm')}",
        'test-requires = ["numpy"]',
        f"test-command = {_toml(command)}",
        "",
        "[tool.cibuildwheel.linux]",
        f"manylinux-{architecture}-image = {_toml(toolkit['image'])}",
        f"before-all = {_toml([*toolkit['install'], headers])}",
        'environment-pass = ["SOURCE_DATE_EPOCH", "MULTIGEMM_COMMIT"]',
        "repair-wheel-command = "
        + _toml(f"auditwheel repair --only-plat --plat {platform} {left_out} -w {{dest_dir}} {{wheel}}"),
        "",
        "[tool.cibuildwheel.linux.environment]",
        *(f"{name} = {_toml(value)}" for name, value in environment.items()),
    ]
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str, where: str) -> str:
    """Return a pyproject.toml with the table between its marker lines at the end, added if absent."""
    begin, end = MARKERS
    if begin not in text and end not in text:
        text = f"{text.rstrip()}\n\n{begin}{end}"
    if text.count(begin) != 1 or text.count(end) != 1 or not text.endswith(end):
        raise SystemExit(
            f"{where}: expected one line {begin.strip()!r} and one {end.strip()!r} that is the last"
        )
    return text.split(begin)[0] + begin + table + end


def values(matrix: Mapping[str, Any], pins: str) -> dict[str, Any]:
    """Return what stands for <<name>> in the workflows."""
    backends, python = matrix["backend"], matrix["python"]
    nox = re.search(r"^nox==(\S+)$", pins, re.MULTILINE)
    if nox is None:
        raise SystemExit("ci/constraints.txt does not pin nox")
    return {
        "jobs_python": python["jobs"],
        "suite_pythons": python["suite"],
        # The interpreter of the job itself comes last.
        "install_pythons": "\n".join(
            [*(v for v in python["test"] if not v.endswith("t") and v != python["jobs"]), python["jobs"]]
        ),
        "cpu_backends": ",".join(b["name"] for b in backends if b["kind"] == "cpu"),
        "native": [{"backend": b["name"], "folder": b["folder"]} for b in backends],
        "native_packages": [b["import_name"] for b in backends],
        "gpu": [
            {"backend": b["name"], "runner": runner}
            for b in backends
            if (runner := toolkit_of(matrix, b)["runner"])
        ],
        "wheel_paths": [
            "packages/*/CMakeLists.txt",
            "packages/*/pyproject.toml",
            "shared/**",
            "ci/matrix.toml",
        ],
        "nox": nox[1],
    }


def workflow(template: str, filled: Mapping[str, Any], where: str) -> str:
    """Return a workflow: the template with its values, under a line that says where it comes from."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in filled:
            raise SystemExit(f"{where}: <<{found[1]}>> has no value; there are {', '.join(sorted(filled))}")
        given = filled[found[1]]
        return given if found[1] == "nox" else json.dumps(given)

    text = re.sub(r"<<(\w+)>>", value, template)
    return f"# Generated from ci/{where} and ci/matrix.toml by ci/generate.py; do not edit.\n{text}"


def files(root: Path, matrix: Mapping[str, Any]) -> dict[str, str]:
    """Return every generated file of this module, relative to the root, with the text it should have."""
    found = {}
    for backend in matrix["backend"]:
        name = f"{backend['folder']}/pyproject.toml"
        if (root / name).exists():
            text = (root / name).read_text(encoding="utf-8")
            found[name] = with_table(text, cibuildwheel_table(matrix, backend), name)
    filled = values(matrix, (root / "ci" / "constraints.txt").read_text(encoding="utf-8"))
    for template in sorted((root / "ci" / "templates").glob("*.yml")):
        where = f"templates/{template.name}"
        text = workflow(template.read_text(encoding="utf-8"), filled, where)
        found[f".github/workflows/{template.name}"] = text
    return found


def _toml(value: Any) -> str:
    """Return a string, or a list of strings, as TOML: JSON's form is TOML's for these."""
    return json.dumps(value)
