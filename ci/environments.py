"""The environments of the noxfile's sessions: made once, under the pins, around one PyTorch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import nox
from generate import ROOT

DIST = ROOT / "dist"
# The requirement of PyTorch, with options of pip where another than the pinned one is wanted.
TORCH = tuple(shlex.split(os.environ.get("MULTIGEMM_TORCH", "torch")))


def identity() -> dict[str, str]:
    """Return what a build says of itself, for tools that ask the environment: the commit, and its time."""
    given = {
        name: os.environ[name] for name in ("MULTIGEMM_COMMIT", "SOURCE_DATE_EPOCH") if name in os.environ
    }
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%H %ct"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except OSError:  # no git
        found = []
    return dict(zip(("MULTIGEMM_COMMIT", "SOURCE_DATE_EPOCH"), found, strict=False)) | given


def cache(session: nox.Session) -> Path:
    """Return the folder for what outlives a session."""
    return (ROOT / session.cache_dir).resolve()


def pins(session: nox.Session, file: str = "constraints.txt") -> tuple[str, str]:
    """Return pip's option for the pins; without the one of PyTorch where MULTIGEMM_TORCH names another."""
    if TORCH == ("torch",):
        return "-c", str(ROOT / "ci" / file)
    folder = cache(session) / "without-torch"
    folder.mkdir(parents=True, exist_ok=True)
    # All of them, as one may name another beside it.
    for given in (ROOT / "ci").glob("*constraints.txt"):
        lines = given.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith("torch=="))
        (folder / given.name).write_text(kept, encoding="utf-8")
    return "-c", str(folder / file)


def shared_environment(
    session: nox.Session,
    name: str,
    *requirements: str,
    headers: tuple[str, ...] = (),
    constraints: str = "constraints.txt",
) -> Path:
    """Return the interpreter of an environment that several sessions use; make it when it is not there.

    Of ``headers`` only files are used, so they come without what they require. The pins are a file of ci/.
    """
    folder = cache(session) / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "complete.txt"
    given = [f.read_text(encoding="utf-8") for f in sorted((ROOT / "ci").glob("*constraints.txt"))]
    key = "\n".join([sys.version, *requirements, *headers, constraints, *given])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != key:
        session.run(
            sys.executable, "-m", "virtualenv", "--clear", "--quiet", str(folder), external=True, silent=True
        )
        session.log(f"installing {', '.join(requirements)} into {folder}")
        for wanted in (requirements, ("--no-deps", *headers) if headers else ()):
            if wanted:
                command = [str(python), "-m", "pip", "install", "-q", *pins(session, constraints), *wanted]
                session.run(*command, external=True, silent=True)
        stamp.write_text(key, encoding="utf-8")
    return python


def site_packages(session: nox.Session, python: str) -> Path:
    """Return the folder where an interpreter's environment keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = session.run(python, "-c", code, external=True, silent=True, log=False)
    return Path(str(answer).strip().splitlines()[-1])


def torch_folder(session: nox.Session) -> Path:
    """Return the packages' folder of the one environment that holds PyTorch."""
    return site_packages(session, str(shared_environment(session, "torch", *TORCH)))


def lend_torch(session: nox.Session, python: str = "python") -> None:
    """Let an environment import, and pip see, the PyTorch of the shared environment."""
    path_file = site_packages(session, python) / "shared_torch.pth"
    path_file.write_text(f"{torch_folder(session)}\n", encoding="utf-8")


def pip_install(session: nox.Session, *arguments: str) -> None:
    """Install into the session's environment, under the pins, with dist/ as one more place to look."""
    session.run(
        "python",
        "-m",
        "pip",
        "install",
        "-q",
        *pins(session),
        "--find-links",
        str(DIST),
        *arguments,
        silent=True,
    )
