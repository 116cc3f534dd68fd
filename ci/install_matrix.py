"""Install the wheels of dist/ in every way that users do, each time into a clean environment.

    python ci/install_matrix.py --dist dist --torch SITE_PACKAGES --work FOLDER [CASE ...]

Each environment sees PyTorch through a path file (SITE_PACKAGES is the folder that holds it), so that no
case downloads it again; everything else is resolved and installed for real, from DIST and from pip's
index. After each step a program computes a product, checks it, and says which backend computed it;
`multigemm doctor --json` must succeed and agree.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from generate import ROOT, read_version

OLD = "0.0.1"
PROGRAM = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import multigemm
    x, w, sizes = torch.randn(7, 3), torch.randn(3, 3, 5), torch.tensor([2, 0, 4])
    y = multigemm.grouped_mm(x, w, sizes)
    where = multigemm.explain(x, w, sizes).implementation
wanted = torch.cat([x[:2] @ w[0], x[2:6] @ w[2], torch.zeros(1, 5)])
torch.testing.assert_close(y, wanted)
texts = [str(c.message) for c in caught if c.category is RuntimeWarning]
print(json.dumps({"file": multigemm.__file__, "where": where, "warnings": texts}))
"""


class Failed(Exception):
    """A case did not behave as it has to."""


@dataclass
class Setting:
    """Where the wheels, PyTorch and the pins are."""

    dist: Path
    torch: Path
    work: Path

    def environment(self, name: str) -> Environment:
        """Make an empty environment that sees nothing but PyTorch."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        call([sys.executable, "-m", "virtualenv", "--quiet", str(folder)])
        python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        environment = Environment(self, python)
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(call([str(python), "-c", code]).strip())
        (site / "shared_torch.pth").write_text(f"{self.torch}\n", encoding="utf-8")
        return environment


@dataclass
class Environment:
    """One virtual environment, and what can be done with it."""

    setting: Setting
    python: Path
    paths: tuple[Path, ...] = ()

    def install(self, *arguments: str, index: Path | None = None) -> None:
        """Run pip install under the pins, with a folder of wheels as one more place to look."""
        pins = ["-c", str(ROOT / "ci" / "constraints.txt"), "--find-links", str(index or self.setting.dist)]
        call([str(self.python), "-m", "pip", "install", "-q", *pins, *arguments])

    def uninstall(self, distribution: str) -> None:
        call([str(self.python), "-m", "pip", "uninstall", "-q", "-y", distribution])

    def expect(self, backend: str, *, refused: str = "", others: tuple[str, ...] = ()) -> None:
        """Compute a product; compare who computed it, and what is warned of, with what has to be.

        ``others`` are backends for devices that this PyTorch does not know.
        """
        env = {"PYTHONPATH": os.pathsep.join(map(str, self.paths))} if self.paths else {}
        told = json.loads(call([str(self.python), "-c", PROGRAM], env).splitlines()[-1])
        if str(ROOT / "packages") in told["file"]:
            raise Failed(f"the source tree was imported: {told['file']}")
        if told["where"] != backend:
            raise Failed(f"{told['where']} computed the product, expected {backend}; {told['warnings']}")
        if bool(refused) != bool(told["warnings"]) or not all(refused in t for t in told["warnings"]):
            raise Failed(f"warnings {told['warnings']}, expected {refused or 'none'}")
        report = json.loads(call([str(self.python), "-m", "multigemm", "doctor", "--json"], env))
        if report["multigemm"]["version"] != read_version() or not report["healthy"]:
            raise Failed(f"doctor finds fault: {json.dumps(report, indent=1)}")
        verdicts = {found["backend"]: found["verdict"] for found in report["backends"]}
        wanted = {} if backend == "reference" and not refused else {"cpu": "refused" if refused else "opened"}
        wanted |= dict.fromkeys(others, "refused")
        if verdicts != wanted:
            raise Failed(f"doctor's verdicts are {verdicts}, expected {wanted}")


def call(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command away from the source tree; return its output, or fail with all of it."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MULTIGEMM_", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        command, env=inherited | (env or {}), cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def old_backend(setting: Setting) -> Path:
    """Return a folder with the CPU wheel as an older release would be: all the same but for the version."""
    (wheel,) = setting.dist.glob("multigemm_cpu-*.whl")
    folder = setting.work / "old-release"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    version = read_version()
    old_info, new_info = (f"multigemm_cpu-{v}.dist-info" for v in (version, OLD))
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith((".json", ".py", "/METADATA")):
                data = data.replace(version.encode(), OLD.encode())
            files[name.replace(old_info, new_info)] = data
    record = f"{new_info}/RECORD"
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
        if name != record
    ]
    files[record] = ("".join(lines) + f"{record},,\n").encode()
    with zipfile.ZipFile(folder / wheel.name.replace(version, OLD), "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return folder


# --- cases ----------------------------------------------------------------------------------------


def front_alone(setting: Setting) -> None:
    """`pip install multigemm`: the PyTorch reference answers, without a word."""
    environment = setting.environment("front-alone")
    environment.install("multigemm")
    environment.expect("reference")


def with_backend(setting: Setting) -> None:
    """`pip install "multigemm[cpu]"`; removing the backend leaves a working front, and back again."""
    environment = setting.environment("with-backend")
    environment.install("multigemm[cpu]")
    environment.expect("cpu")
    environment.uninstall("multigemm-cpu")
    environment.expect("reference")
    environment.install("multigemm[cpu]")
    environment.expect("cpu")


def skewed_versions(setting: Setting) -> None:
    """A backend of another release is refused with a warning and mended by the line that is advised."""
    environment = setting.environment("skewed-versions")
    environment.install("multigemm")
    environment.install(f"multigemm-cpu=={OLD}", index=old_backend(setting))
    environment.expect("reference", refused=f"its version is {OLD}")
    environment.install("--upgrade", "multigemm[cpu]")
    environment.expect("cpu")


def target_folder(setting: Setting) -> None:
    """`pip install --target`: the front and the backend lie in a folder that only PYTHONPATH names."""
    environment = setting.environment("target-folder")
    folder = setting.work / "target-folder-packages"
    shutil.rmtree(folder, ignore_errors=True)
    # --target looks at nothing that is installed and would bring PyTorch too, so its packages are named.
    names = ["multigemm", "multigemm-cpu", "scipy-openblas32"]
    environment.install("typer>=0.12", "rich>=13")
    environment.install("--no-deps", "--target", str(folder), *names)
    environment.paths = (folder,)
    environment.expect("cpu")


def user_folder(setting: Setting) -> None:
    """Backend in one folder, its BLAS in another, as where an administrator installed half of it."""
    environment = setting.environment("user-folder")
    folder = setting.work / "user-folder-packages"
    shutil.rmtree(folder, ignore_errors=True)
    environment.install("multigemm", "scipy-openblas32")
    environment.install("--no-deps", "--target", str(folder), "multigemm-cpu")
    environment.paths = (folder,)
    environment.expect("cpu")


def gpu_backends(setting: Setting) -> None:
    """`pip install "multigemm[cpu,cu13,rocm]"` beside a PyTorch for the CPU: refused, and harmless."""
    names = gpu_wheels(setting)
    environment = setting.environment("gpu-backends")
    environment.install(f"multigemm[{','.join(('cpu', *names))}]")
    environment.expect("cpu", others=names)
    environment.uninstall("multigemm-cpu")
    environment.expect("reference", others=names)


def gpu_wheels(setting: Setting) -> tuple[str, ...]:
    """The backends for GPUs whose wheels were built here."""
    return tuple(name for name in ("cu13", "rocm") if list(setting.dist.glob(f"multigemm_{name}-*.whl")))


CASES: dict[str, Callable[[Setting], None]] = {
    case.__name__: case
    for case in (front_alone, with_backend, skewed_versions, target_folder, user_folder, gpu_backends)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, required=True, help="folder of the wheels")
    parser.add_argument("--torch", type=Path, required=True, help="folder of packages that holds PyTorch")
    parser.add_argument("--work", type=Path, required=True, help="folder for the environments")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all by default: {', '.join(CASES)}")
    options = parser.parse_args()
    setting = Setting(options.dist.resolve(), options.torch.resolve(), options.work.resolve())
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown cases {', '.join(unknown)}; known are {', '.join(CASES)}")
    failed, names = 0, list(options.cases or CASES)
    if not options.cases and not gpu_wheels(setting):
        names.remove(gpu_backends.__name__)
        print(f"left out {gpu_backends.__name__}: no wheel of theirs was built here", flush=True)
    for name in names:
        start, trouble = time.monotonic(), ""
        try:
            CASES[name](setting)
        except Failed as error:
            failed, trouble = failed + 1, f": {error}"
        print(
            f"{'FAILED' if trouble else 'ok'} {name} ({time.monotonic() - start:.0f} s){trouble}", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
