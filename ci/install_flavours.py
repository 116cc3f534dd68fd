"""Cases of the install matrix with a PyTorch that says it is built for a GPU: a right backend, a wrong one.

PyTorch itself is the one for the CPU in a folder of links, with another version.py. So nothing is computed on
a GPU; what is tested is which backend is taken, what is opened for it, and what a wrong pair is told.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from install_kit import ROWS, Environment, Failed, Setting, call, fresh

ASK = """
import json
from multigemm import _dispatch, errors
def mapped():
    with open("/proc/self/maps") as stream:
        return sorted({line.split(None, 5)[5].strip() for line in stream if ".so" in line})
try:
    found, text = _dispatch.backend_for("cuda").name, ""
except errors.BackendError as error:
    found, text = type(error).__name__, str(error)
ours = [path for path in mapped() if "multigemm_" in path or "libcublas" in path]
print(json.dumps({"found": found, "text": text, "mapped": ours}))
"""
# What PyTorch may say of itself, and the version of its wheel.
FLAVOURS = {
    "cuda12": ("cuda", "12.8"),
    "cuda13": ("cuda", "13.0"),
    "rocm6": ("hip", "6.4.2"),
    "rocm7": ("hip", "7.1.0"),
}


def claiming(setting: Setting, flavour: str, case: str) -> Path:
    """Return a folder of links to PyTorch and all beside it, in which it says that it is of that flavour.

    Each case has its own: cases run side by side, and one would read what another is making anew.
    """
    field, version = FLAVOURS[flavour]
    folder = fresh(setting.work / "claims" / case)
    for entry in setting.torch.iterdir():
        if entry.name not in ("torch", "__pycache__") and not entry.name.startswith(("pip", "setuptools")):
            (folder / entry.name).symlink_to(entry)
    (folder / "torch").mkdir()
    for entry in (setting.torch / "torch").iterdir():
        if entry.name not in ("version.py", "__pycache__"):
            (folder / "torch" / entry.name).symlink_to(entry)
    text = (setting.torch / "torch" / "version.py").read_text(encoding="utf-8")
    changed, count = re.subn(rf"^{field}\b.*= None$", f"{field} = {version!r}", text, flags=re.MULTILINE)
    if count != 1:
        raise Failed(f"this PyTorch is not one for the CPU: {text}")
    (folder / "torch" / "version.py").write_text(changed, encoding="utf-8")
    return folder


def fits(name: str, flavour: str) -> bool:
    """Tell whether a backend is for a PyTorch of that flavour."""
    return ROWS[name]["toolkit"].replace(" ", "").lower() == flavour


def wrong(flavour: str, setting: Setting, case: str) -> None:
    """Every backend but the right one: refused before anything is opened, with the line that mends it."""
    names = [name for name in setting.backends() if ROWS[name]["kind"] != "cpu" and not fits(name, flavour)]
    environment = Environment(setting, case, torch=claiming(setting, flavour, case))
    environment.install(f"multigemm[{','.join(names)}]")
    told = environment.run(ASK)
    if told["found"] != "FlavourMismatch" or told["mapped"]:
        raise Failed(f"expected a refusal and nothing opened: {told}")
    version = FLAVOURS[flavour][1]
    right = next((name for name in ROWS if fits(name, flavour)), None)
    for text in (version, *names, *([f"multigemm[{right}]"] if right else [])):
        if text not in told["text"]:
            raise Failed(f"the refusal does not say {text}: {told['text']}")


def right(name: str, flavour: str, setting: Setting, case: str) -> None:
    """All backends: the right one is taken and opened, with the libraries of the vendor's wheels."""
    environment = Environment(setting, case, torch=claiming(setting, flavour, case))
    environment.install(f"multigemm[{','.join(setting.backends())}]")
    needed, hostile = setting.info(name)["needed"], fresh(setting.work / f"hostile-{name}")
    for entry in needed:
        # The stand-in goes; what it stood for is linked in from where it was installed for the build.
        file = environment.site / entry["folder"] / entry["soname"]
        file.unlink()
        file.symlink_to(setting.vendors[name] / entry["folder"] / entry["soname"])
        foreign_library(hostile / entry["soname"])
    for env in ({}, {"LD_LIBRARY_PATH": str(hostile)}):
        told = environment.run(ASK, **env)
        if told["found"] != name:
            raise Failed(f"{told['found']} instead of {name}: {told['text']}")
        strangers = [path for path in told["mapped"] if path.startswith(str(hostile))]
        others = [p for p in told["mapped"] if "/multigemm_" in p and f"/multigemm_{name}/" not in p]
        if strangers or others:
            raise Failed(f"opened {strangers + others}")
        for entry in needed:
            if not any(path.endswith(f"{entry['folder']}/{entry['soname']}") for path in told["mapped"]):
                raise Failed(f"{entry['soname']} was not opened: {told['mapped']}")


def foreign_library(path: Path) -> None:
    """Write a library of that SONAME without a single function: with it in the process, nothing opens."""
    compiler = next(c for c in (os.environ.get("CC", "cc"), "gcc", "clang") if shutil.which(c))
    source = path.with_suffix(".c")
    source.write_text("", encoding="utf-8")
    call([compiler, "-shared", "-fPIC", "-o", str(path), str(source), f"-Wl,-soname,{path.name}"])


def flavour_cases(setting: Setting) -> dict[str, Callable[[Setting, str], None]]:
    """The cases for the backends that are here; a right one needs its vendor's libraries too."""
    names = [name for name in setting.backends() if ROWS[name]["kind"] != "cpu"]
    found: dict[str, Callable[[Setting, str], None]] = {}
    for flavour in FLAVOURS if names else ():
        if any(not fits(name, flavour) for name in names):
            found[f"wrong_flavour_{flavour}"] = functools.partial(wrong, flavour)
        for name in names:
            if fits(name, flavour) and (name in setting.vendors or not setting.info(name)["needed"]):
                found[f"right_flavour_{name}"] = functools.partial(right, name, flavour)
    return found
