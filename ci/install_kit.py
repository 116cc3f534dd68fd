"""What the install matrix works with: clean environments, a local index, wheels that stand for others.

Everything is installed from one folder of wheels, with --no-index: ours, what the front requires, and
stand-ins for what is too large. Those for vendors' libraries are no libraries, so whoever opens one fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path
from typing import Any

from generate import ROOT, read_matrix, read_version
from packaging.requirements import Requirement

OLD = "0.0.1"
MATRIX = read_matrix()
ROWS = {row["name"]: row for row in MATRIX["backend"]}
# What the front requires besides PyTorch, and the BLAS of the CPU backend: real wheels, downloaded once.
REAL = ("typer>=0.12", "rich>=13", "scipy-openblas32", "numpy")
PROGRAM = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import multigemm
    from multigemm.cli.doctor import examine
    x, w, sizes = torch.randn(7, 3), torch.randn(3, 3, 5), torch.tensor([2, 0, 4])
    y = multigemm.grouped_mm(x, w, sizes)
    where = multigemm.explain(x, w, sizes).implementation
    report = examine()
wanted = torch.cat([x[:2] @ w[0], x[2:6] @ w[2], torch.zeros(1, 5)])
torch.testing.assert_close(y, wanted)
texts = [str(c.message) for c in caught if c.category is RuntimeWarning]
print(json.dumps({"file": multigemm.__file__, "where": where, "warnings": texts, "report": report}))
"""


class Failed(Exception):
    """A case did not behave as it has to."""


def call(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command away from the source tree; return its output, or fail with all of it."""
    dropped = ("PYTHON", "MULTIGEMM_", "VIRTUAL_ENV", "LD_", "UV_", "PIP_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_WARN_SCRIPT_LOCATION": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=inherited | quiet | (env or {}), cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def fresh(folder: Path) -> Path:
    """Return a folder that is empty now."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# --- wheels ---------------------------------------------------------------------------------------


def write_wheel(path: Path, files: dict[str, bytes], dist_info: str) -> Path:
    """Write a wheel, with a RECORD of its files."""
    record = f"{dist_info}/RECORD"
    files = {name: data for name, data in files.items() if name != record}
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(record, "".join(lines) + f"{record},,\n")
    return path


def stand_in(folder: Path, distribution: str, version: str, files: dict[str, bytes] | None = None) -> Path:
    """Write a wheel of that name and version which holds these files, by default none."""
    stem = f"{distribution.replace('-', '_')}-{version}"
    dist_info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    told = {
        f"{dist_info}/METADATA": metadata.encode(),
        f"{dist_info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return write_wheel(folder / f"{stem}-py3-none-any.whl", (files or {}) | told, dist_info)


def as_version(wheel: Path, folder: Path, version: str) -> Path:
    """Write a wheel of ours as an older release would be: all the same but for the version."""
    package, now = wheel.name.split("-")[:2]
    old_info, new_info = (f"{package}-{v}.dist-info" for v in (now, version))
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith((".json", "_version.py", "/METADATA")):
                data = data.replace(now.encode(), version.encode())
            files[name.replace(old_info, new_info)] = data
    return write_wheel(folder / wheel.name.replace(now, version), files, new_info)


@dataclass
class Setting:
    """Where the wheels, PyTorch and the folders of the cases are."""

    dist: Path
    torch: Path
    work: Path
    vendors: dict[str, Path] = field(default_factory=dict)  # by backend: packages with the real libraries

    @property
    def index(self) -> Path:
        return self.work / "index"

    @property
    def old(self) -> Path:
        return self.work / "old-release"

    def backends(self, kind: str = "") -> list[str]:
        """The backends whose wheels are here, all or those of a kind."""
        return [n for n, row in ROWS.items() if self.wheels(row) and kind in ("", row["kind"])]

    def wheels(self, package: dict[str, Any]) -> list[Path]:
        stem = package["distribution"].replace("-", "_")
        return list(self.dist.glob(f"{stem}-{read_version()}-*.whl"))

    def info(self, name: str) -> dict[str, Any]:
        """The backend.json of a backend's wheel."""
        (wheel,) = self.wheels(ROWS[name])
        with zipfile.ZipFile(wheel) as archive:
            info: dict[str, Any] = json.loads(archive.read(f"{ROWS[name]['import_name']}/backend.json"))
        return info

    def prepare(self, pythons: Iterable[str]) -> None:
        """Fill the index for these Pythons, and make the older release of everything."""
        index, old = fresh(self.index), fresh(self.old)
        downloads = self.work / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        fetch(downloads, pythons)
        for wheel in downloads.glob("*.whl"):
            shutil.copy(wheel, index)
        torch = next(self.torch.glob("torch-*.dist-info")).name.split("-")[1]
        stand_in(index, "torch", torch)
        packages = [MATRIX["front"], *(ROWS[name] for name in self.backends())]
        for package in packages:
            (wheel,) = self.wheels(package)
            shutil.copy(wheel, index)
            as_version(wheel, old, OLD)
        for name in self.backends():
            self.add_vendors(name)

    def add_vendors(self, name: str) -> None:
        """Put stand-ins for the vendors' wheels that a GPU backend requires into the index."""
        (wheel,) = self.wheels(ROWS[name])
        package = ROWS[name]["import_name"]
        with zipfile.ZipFile(wheel) as archive:
            metadata = message_from_bytes(archive.read(f"{package}-{read_version()}.dist-info/METADATA"))
        needed = self.info(name)["needed"]
        for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
            if requirement.name in {Requirement(r).name for r in REAL}:
                continue
            ours = [e for e in needed if e["distribution"] == requirement.name]
            files = {f"{e['folder']}/{e['soname']}": b"no library" for e in ours}
            floor = next(s.version for s in requirement.specifier if s.operator == ">=")
            stand_in(self.index, requirement.name, f"{floor}.0", files)


def fetch(folder: Path, pythons: Iterable[str]) -> None:
    """Download what is real, once for each Python."""
    pins = ROOT / "ci" / "constraints.txt"
    names = tuple(f"{Requirement(r).name}==" for r in REAL)
    lines = pins.read_text(encoding="utf-8").splitlines()
    key = "\n".join([*REAL, *(line for line in lines if line.startswith(names))])
    for version in pythons:
        stamp = folder / f"{version}.txt"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
            continue
        # The pins are for one Python; the others take what is newest for them.
        pinned = ["-c", str(pins)] if version == MATRIX["python"]["jobs"] else []
        command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", *pinned]
        call([*command, "--python-version", version, "-d", str(folder), *REAL], pip_settings())
        stamp.write_text(key, encoding="utf-8")


def pip_settings() -> dict[str, str]:
    """What the environment says of pip, for the one step that asks an index."""
    return {k: v for k, v in os.environ.items() if k.startswith("PIP_") and k != "PIP_CONSTRAINT"}


# --- environments ---------------------------------------------------------------------------------


@dataclass
class Environment:
    """One virtual environment, and what can be done with it."""

    setting: Setting
    name: str
    interpreter: str = sys.executable
    torch: Path | None = None  # a folder of packages that is seen through a path file
    system: bool = False  # sees the interpreter's own packages, as --user needs
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.setting.work / "environments" / self.name
        shutil.rmtree(self.folder, ignore_errors=True)
        options = ["--system-site-packages"] if self.system else []
        options += ["--no-setuptools"] if sys.version_info < (3, 12) else []
        command = [sys.executable, "-m", "virtualenv", "--quiet", "--python", self.interpreter]
        call([*command, *options, str(self.folder)])
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(call([str(self.python), "-c", code]).strip())
        if self.torch is not None:
            (self.site / "shared_torch.pth").write_text(f"{self.torch}\n", encoding="utf-8")

    def install(self, *arguments: str, old: bool = False) -> None:
        """Run pip install, from the index alone, or from the older release and it."""
        places = ["--find-links", str(self.setting.index)]
        places += ["--find-links", str(self.setting.old)] if old else []
        self.pip("install", "--no-index", *places, *arguments)

    def uninstall(self, *names: str) -> None:
        self.pip("uninstall", "-y", *names)

    def pip(self, command: str, *arguments: str) -> None:
        """Run pip, deaf to this machine's settings, which may name more places to look."""
        env = self.env | {"PIP_CONFIG_FILE": os.devnull}
        call([str(self.python), "-m", "pip", command, "-q", *arguments], env)

    def run(self, code: str, **env: str) -> dict[str, Any]:
        """Run a program in a process of its own; return what it printed last, as JSON."""
        told: dict[str, Any] = json.loads(
            call([str(self.python), "-c", code], self.env | env).splitlines()[-1]
        )
        return told

    def intact(self, distribution: str) -> None:
        """Every file of an installed wheel is there, with the hash of its RECORD."""
        (record,) = self.site.glob(f"{distribution.replace('-', '_')}-*.dist-info/RECORD")
        for line in record.read_text(encoding="utf-8").splitlines():
            name, digest, _ = line.rsplit(",", 2)
            file = self.site / name
            if not file.is_file():
                raise Failed(f"{name} of {distribution} is gone")
            found = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
            if digest and digest != f"sha256={found}":
                raise Failed(f"{name} of {distribution} was overwritten")

    def expect(self, *backends: str, **env: str) -> dict[str, Any]:
        """Compute a product; compare who computed it, and what doctor says, with what has to be.

        ``backends`` are all that are installed: that of the CPU computes, the others are for devices that
        this PyTorch does not know.
        """
        told = self.run(PROGRAM, **env)
        if str(ROOT / "packages") in told["file"]:
            raise Failed(f"the source tree was imported: {told['file']}")
        cpu = [name for name in backends if ROWS[name]["kind"] == "cpu"]
        wanted = cpu[0] if cpu else "reference"
        if told["where"] != wanted or told["warnings"]:
            raise Failed(f"{told['where']} computed the product, expected {wanted}; {told['warnings']}")
        report: dict[str, Any] = told["report"]
        if report["multigemm"]["version"] != read_version() or not report["healthy"]:
            raise Failed(f"doctor finds fault: {json.dumps(report, indent=1)}")
        verdicts = {found["backend"]: found["verdict"] for found in report["backends"]}
        expected = {name: "opened" if name in cpu else "refused" for name in backends}
        if verdicts != expected:
            raise Failed(f"doctor's verdicts are {verdicts}, expected {expected}")
        for found in report["backends"]:
            if found["verdict"] == "refused" and "has no GPU support" not in found["reason"]:
                raise Failed(f"{found['backend']} is refused because {found['reason']}")
        return told
