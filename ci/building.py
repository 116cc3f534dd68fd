"""How the noxfile's jobs get wheels: what is built from what, with which compiler, and when it is stale."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nox
from compilers import CUDA_PACKAGES, missing
from environments import DIST, cache, identity, lend_torch, pip_install, shared_environment
from generate import ROOT, read_matrix

MATRIX = read_matrix()
# MULTIGEMM_BACKENDS names the backends of this run, where all the others are to be left out.
CHOSEN = [n for n in os.environ.get("MULTIGEMM_BACKENDS", "").split(",") if n]
PACKAGES: dict[str, dict[str, Any]] = {"front": MATRIX["front"]} | {
    b["name"]: b for b in MATRIX["backend"] if not CHOSEN or b["name"] in CHOSEN
}
NATIVE = [name for name in PACKAGES if name != "front"]


def install_ours(session: nox.Session, *names: str, extras: str = "") -> None:
    """Make exactly these of our wheels installed in the session's environment, whatever was there."""
    wheels = {name: build_wheel(session, name) for name in names}
    session.run(
        "python",
        "-m",
        "pip",
        "uninstall",
        "-q",
        "-y",
        *(p["distribution"] for p in PACKAGES.values()),
        silent=True,
    )
    wanted = [f"{wheel}{extras}" if name == "front" else str(wheel) for name, wheel in wheels.items()]
    pip_install(session, *wanted)


def sources_of(name: str) -> str:
    """Return a digest of everything that a wheel is made from."""
    folders = [ROOT / PACKAGES[name]["folder"]]
    folders += [ROOT / "shared"] if name in NATIVE else []
    files = [ROOT / "shared" / "version.txt", *(ROOT / "ci").glob("*constraints.txt")]
    for folder in folders:
        files += [f for f in folder.rglob("*") if f.is_file() and not is_by_product(f)]
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def is_by_product(file: Path) -> bool:
    """Tell whether a file was left by a tool."""
    folders = file.relative_to(ROOT).parts[:-1]
    return any(part in ("__pycache__", "build", "dist") or part.startswith(".") for part in folders)


def missing_compiler(name: str) -> str:
    """Return which compiler a package needs that this machine lacks, or nothing; in CI that is clang."""
    return "" if name == "front" else missing(PACKAGES[name])


def architectures_of(name: str) -> str:
    """Return what a GPU wheel is built for: MULTIGEMM_CUDA_ARCHITECTURES; "release" means all of them."""
    if PACKAGES[name].get("kind") != "cuda":
        return ""
    given = os.environ.get("MULTIGEMM_CUDA_ARCHITECTURES", "")
    if given not in ("", "release"):
        return given
    return ";".join(PACKAGES[name]["architectures" if given else "quick"])


def build_environment(session: nox.Session, name: str) -> str:
    """Return the interpreter that builds a package; each toolkit's libraries are in one of their own."""
    # No build isolation: a native wheel needs PyTorch's headers, which a requirement would download again.
    requirements = {"build", "hatchling", "scikit-build-core", "cmake", "ninja"}
    if PACKAGES[name].get("kind") == "cuda":
        requirements.update(CUDA_PACKAGES[PACKAGES[name]["toolkit"]])
        folder, headers = f"build-{name}", ("nvidia-cutlass",)
    else:
        requirements.add("scipy-openblas32")
        folder, headers = "build", ()
    floors = "build-constraints.txt"
    return str(
        shared_environment(session, folder, *sorted(requirements), headers=headers, constraints=floors)
    )


def build_wheel(session: nox.Session, name: str) -> Path:
    """Return the wheel of a package in dist/, built now unless it is there and as new as its sources."""
    package = PACKAGES[name]
    stem = package["distribution"].replace("-", "_")
    stamp, architectures = DIST / f".{name}.sources", architectures_of(name)
    sources = f"{sources_of(name)} {architectures}".strip()
    wheels = list(DIST.glob(f"{stem}-*.whl"))
    if len(wheels) == 1 and stamp.exists() and stamp.read_text(encoding="utf-8") == sources:
        return wheels[0]
    for old in [*wheels, *DIST.glob(f"{stem}-*.tar.gz")]:
        old.unlink()
    # What was compiled before is kept: minutes for CUDA.
    compile_package(session, name, ROOT, DIST, cache(session) / f"objects-{name}")
    stamp.write_text(sources, encoding="utf-8")
    (wheel,) = DIST.glob(f"{stem}-*.whl")
    return wheel


def build_without(session: nox.Session, name: str, defence: str) -> Path:
    """Return a wheel of a GPU backend that lacks a defence, for tests of the tests; none of dist/ itself.

    It shares the folder of objects with the whole one, of which it compiles three files anew.
    """
    out = DIST / f"without-{defence}"
    for old in out.glob("*.whl"):
        old.unlink()
    environment = {"MULTIGEMM_WITHOUT": defence}
    compile_package(session, name, ROOT, out, cache(session) / f"objects-{name}", environment)
    (wheel,) = out.glob("*.whl")
    return wheel


def compile_package(
    session: nox.Session,
    name: str,
    root: Path,
    out: Path,
    objects: Path,
    more: Mapping[str, str] | None = None,
) -> None:
    """Build the wheel of a package from the tree at ``root``, of the front an sdist too."""
    python, architectures = build_environment(session, name), architectures_of(name)
    arguments = ["--outdir", str(out), str(root / PACKAGES[name]["folder"])]
    if name in NATIVE:
        lend_torch(session, python)
        # No sdist, as shared/ lies outside the package.
        arguments = ["--wheel", f"-Cbuild-dir={objects}", *arguments]
    environment = {
        **identity(),
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        # One compiler for each core: a CUDA one takes gigabytes.
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1)),
        **({"MULTIGEMM_CUDA_ARCHITECTURES": architectures} if architectures else {}),
        # What whoever called nox has set is for no wheel of dist/.
        "MULTIGEMM_WITHOUT": "",
        **(more or {}),
    }
    session.run(
        python, "-m", "build", "--no-isolation", *arguments, external=True, env=environment, silent=True
    )
