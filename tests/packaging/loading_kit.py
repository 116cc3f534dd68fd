"""Fake site folders: stub PyTorch, fake backends, fake vendor libraries, and processes that load them.

Every loading test runs in a process of its own with a scrubbed environment, because a library that one
test has opened (PyTorch first of all) would hide the fault that another looks for. Processes start with
``-S``, so that backends installed beside this interpreter are not seen; the real PyTorch, where a test
wants it, comes through a folder of links that leaves the backends out.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

FRONT = Path(importlib.util.find_spec("multigemm").submodule_search_locations[0])
VERSION = "0.1.0"
FUNCTIONS = [
    "mg_abi_sizes",
    "mg_last_error",
    "mg_grouped_mm",
    "mg_grouped_mm_explain",
    "mg_grouped_mm_wgrad",
    "mg_grouped_mm_wgrad_explain",
]
PRELUDE = """
import json, sys, warnings
def show(**values):
    print("RESULT " + json.dumps(values))
def mapped():
    with open("/proc/self/maps") as stream:
        paths = {"/" + line.rstrip("\\n").partition("/")[2] for line in stream if ".so" in line}
    return sorted(paths)
"""


# --- C libraries ----------------------------------------------------------------------------------


def compile_library(path, source, *, soname=None, needs=(), flags=()):
    """Compile C text into a shared library; ``needs`` are libraries to link, kept even if unused."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_suffix(".c")
    text.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-O0", "-o", str(path), str(text), "-Wl,--no-as-needed"]
    if soname:
        command.append(f"-Wl,-soname,{soname}")
    for library in needs:
        command += [f"-L{Path(library).parent}", f"-l:{Path(library).name}"]
    subprocess.run([*command, "-Wl,--allow-shlib-undefined", *flags], check=True, capture_output=True)
    text.unlink()
    return path


def backend_source(name, query, *, without=(), extra=""):
    """C text of a backend that computes nothing: the functions of the C ABI, and what it says of itself."""
    lines = [
        f"int {function}_{name}(void) {{ return 0; }}" for function in FUNCTIONS if function not in without
    ]
    if "mg_query" not in without:
        answer = json.dumps(query if isinstance(query, str) else json.dumps(query))
        lines.append(f"const char *mg_query_{name}(void) {{ return {answer}; }}")
    return "\n".join([extra, *lines, ""])


def vendor_libraries(folder, major, tag, *, functions=()):
    """Write libcublasLt.so.N and libcublas.so.N (which needs the first); each returns ``tag``."""
    folder = Path(folder)
    lt = compile_library(
        folder / f"libcublasLt.so.{major}",
        f'const char *fake_lt_tag(void) {{ return "{tag}"; }}',
        soname=f"libcublasLt.so.{major}",
    )
    more = "".join(f"int {function}(void) {{ return 0; }}\n" for function in functions)
    blas = compile_library(
        folder / f"libcublas.so.{major}",
        f'{more}const char *fake_lt_tag(void);\nconst char *fake_blas_tag(void) {{ return "{tag}"; }}',
        soname=f"libcublas.so.{major}",
        needs=[lt],
        # A RUNPATH of its own, as the loader then ignores the RPATH of the backend for cublasLt.
        flags=["-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN"],
    )
    return lt, blas


CUBLAS_FOLDER = {12: "nvidia/cublas/lib", 13: "nvidia/cu13/lib"}


def needed_cublas(major):
    distribution = "nvidia-cublas" if major == 13 else "nvidia-cublas-cu12"
    return [
        {
            "soname": f"{stem}.so.{major}",
            "distribution": distribution,
            "folder": CUBLAS_FOLDER[major],
            "min_version": f"{major}.0",
            "optional": False,
        }
        for stem in ("libcublasLt", "libcublas")
    ]


# --- site folders ---------------------------------------------------------------------------------


class Site:
    """A folder for ``sys.path``."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, path, text):
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def stub_torch(self, version="2.13.0", cuda=None, hip=None, on_import=""):
        """A PyTorch that knows its version, records load_library, and has a ``cuda`` that always raises."""
        self.write(
            "torch/version.py",
            "from typing import Optional\n"
            f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n",
        )
        self.write(
            "torch/cuda.py",
            "def __getattr__(name):\n    raise RuntimeError(f'torch.cuda.{name} was touched')\n",
        )
        self.write(
            "torch/ops.py",
            "import ctypes\ncalls = []\n"
            "def load_library(path):\n"
            "    calls.append(path)\n"
            "    try:\n        ctypes.CDLL(path)\n"
            "    except Exception as e:\n"
            "        raise OSError(f'Could not load this library: {path}') from e\n",
        )
        self.write(
            "torch/__init__.py",
            f"from .version import __version__\nfrom . import cuda, ops, version\n{on_import}\n",
        )
        return self

    def stub_front(self, version=VERSION):
        """The front's dispatch without its operators, which would import the real PyTorch."""
        self.write("multigemm/__init__.py", f"__path__.append({str(FRONT)!r})\n")
        self.write("multigemm/_version.py", f"__version__ = {version!r}\n")
        self.write("multigemm/ops.py", "")
        return self

    def record(self, name, version=VERSION, *, module=None):
        """Write the metadata that an installer leaves."""
        module = module or f"multigemm_{name}"
        folder = f"multigemm_{name}-{version}.dist-info"
        self.write(
            f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: multigemm-{name}\nVersion: {version}\n"
        )
        self.write(f"{folder}/entry_points.txt", f"[multigemm.backends]\n{name} = {module}\n")
        self.write(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        self.write(f"{folder}/RECORD", "")
        return self.folder / folder

    def backend(self, name, *, version=VERSION, query=None, without=(), extra="", needs=(), flags=(), **info):
        """Install a fake backend; keyword arguments replace fields of backend.json. Returns its folder."""
        major = int(name[2:]) if name.startswith("cu") else 7 if name == "rocm" else None
        kind = "cuda" if name.startswith("cu") else name
        described = {
            "protocol": 1,
            "abi": 1,
            "version": version,
            "name": name,
            "kind": kind,
            "major": major,
            "toolkit": [major, 0] if major else None,
            "min_torch": [2, 10],
            "min_blas": None,
            "architectures": [],
            "library": f"lib/libmultigemm_{name}.so",
            "needed": [],
            "optional_symbols": [],
            "commit": "unknown",
            **info,
        }
        package = f"multigemm_{name}"
        self.write(f"{package}/__init__.py", f"__version__ = {version!r}\n")
        self.write(f"{package}/backend.json", json.dumps(described))
        self.record(name, version)
        source = backend_source(name, query or {"abi": 1}, without=without, extra=extra)
        compile_library(
            self.folder / package / "lib" / f"libmultigemm_{name}.so", source, needs=needs, flags=flags
        )
        return self.folder / package

    def cublas(self, major, tag="site", **options):
        return vendor_libraries(self.folder / CUBLAS_FOLDER[major], major, tag, **options)


# Modules whose folders hold what the front needs; under nox, torch and the rest are in two environments.
REAL = ("torch", "sympy", "typer", "rich", "numpy")


def real_torch(folder):
    """A folder of links to everything installed beside the real PyTorch, but for the backends."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for origin in {Path(importlib.util.find_spec(n).origin).parent.parent for n in REAL}:
        for entry in origin.iterdir():
            if not entry.name.startswith(("multigemm", "__pycache__")) and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    if not (folder / "multigemm").exists():
        (folder / "multigemm").symlink_to(FRONT)
    return folder


# --- processes ------------------------------------------------------------------------------------


def start(code, *paths, env=None, arguments=(), timeout=120):
    """Run code in a fresh interpreter that sees only ``paths``; returns the finished process."""
    folders = [str(getattr(path, "folder", path)) for path in paths]
    clean = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": folders[0],
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    command = [sys.executable, "-S", *arguments, "-c", PRELUDE + code]
    return subprocess.run(
        command, env=clean, cwd="/", capture_output=True, text=True, timeout=timeout, check=False
    )


def run(code, *paths, env=None, arguments=()):
    """Run code that calls ``show(...)`` once; returns the values shown. A failing process fails the test."""
    return shown(start(code, *paths, env=env, arguments=arguments))


def shown(done):
    """The values that a finished process has shown."""
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("RESULT "))


# Asks the dispatch for one device type and shows everything that can be seen from outside.
ASK = """
from multigemm import _dispatch
import torch
device = {device!r}
out = dict(error=None, text="", name=None, warnings=[], steps=[], disabled={{}})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for attempt in range(2):
        try:
            backend = _dispatch.backend_for(device)
            if backend is not None:
                out.update(name=backend.name, folder=backend.folder, disabled=dict(backend.disabled))
        except ImportError as error:
            out.setdefault("texts", []).append(str(error))
            out.update(error=type(error).__name__, text=str(error), steps=list(error.steps))
out["warnings"] = [str(w.message) for w in caught if w.category is RuntimeWarning]
out["opened"] = list(torch.ops.calls)
out["mapped"] = [path for path in mapped() if "multigemm" in path or "cublas" in path]
out["findings"] = [[f.backend, f.version, f.verdict, f.reason, f.opened] for f in _dispatch.findings()]
show(**out)
"""


def ask(device, *paths, env=None):
    return run(ASK.format(device=device), *paths, env=env)


# --- this environment -----------------------------------------------------------------------------


class Wheel:
    """A backend that is installed beside this interpreter, or is not."""

    def __init__(self, name):
        self.name = name
        spec = importlib.util.find_spec(f"multigemm_{name}")
        self.installed = spec is not None
        self.folder = Path(spec.origin).parent if self.installed else Path()
        self.info = json.loads((self.folder / "backend.json").read_text()) if self.installed else {}
        self.core, self.binding = (str(self.folder / self.info.get(part, "")) for part in ("core", "library"))
        # Opens the core alone: no PyTorch.
        self.open = f"""
import ctypes
handle = ctypes.CDLL({self.core!r})
handle.mg_query_{name}.restype = ctypes.c_char_p
query = json.loads(handle.mg_query_{name}())
"""


def run_here(code, **env):
    """Run code in a fresh process of this environment; returns what it showed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MULTIGEMM_", "LD_"))}
    command = [sys.executable, "-c", PRELUDE + code]
    return shown(
        subprocess.run(command, env=kept | env, cwd="/", capture_output=True, text=True, check=False)
    )


def ci_script(name):
    """A script of ci/ as a module; it is no package."""
    path = Path(__file__).resolve().parents[2] / "ci" / f"{name}.py"
    if str(path.parent) not in sys.path:  # they import each other
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"multigemm_ci_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module
