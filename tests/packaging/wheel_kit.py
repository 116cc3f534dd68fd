"""Small wheels of a CPU backend, good and bad, made with a C compiler: what the audits are tested on."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

COMPILER = shutil.which("cc") or shutil.which("gcc")


def exported() -> tuple[str, ...]:
    """The functions of the C ABI that every backend has, read from ci/audit.py without importing it."""
    path = Path(__file__).resolve().parents[2] / "ci" / "audit.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FUNCTIONS":
            found: tuple[str, ...] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{path} has no FUNCTIONS")


FUNCTIONS = exported()
GOOD_CODE = "".join(f"int {name}_cpu(void) {{ return 0; }}\n" for name in FUNCTIONS)
HIDDEN = '__attribute__((visibility("hidden"))) '
GOOD_BINDING = (
    "extern int torch_get_num_threads(unsigned*), mg_query_cpu(void);\n"
    f"{HIDDEN}int use(void) {{ return torch_get_num_threads(0) + mg_query_cpu(); }}\n"
)
BLAS = {
    "soname": "libscipy_openblas.so",
    "distribution": "scipy-openblas32",
    "folder": "scipy_openblas32/lib",
    "min_version": "0.3.29",
    "optional": False,
}
INFO: dict[str, Any] = {
    "protocol": 1,
    "abi": 1,
    "version": "0.1.0",
    "name": "cpu",
    "kind": "cpu",
    "min_torch": [2, 10],
    "architectures": ["x86-64"],
    "library": "lib/libmultigemm_cpu_torch.so",
    "core": "lib/libmultigemm_cpu.so",
    "needed": [BLAS],
    "optional_symbols": [],
    "commit": "unknown",
}
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
METADATA = """Metadata-Version: 2.4
Name: multigemm-cpu
Version: 0.1.0
Requires-Python: >=3.10
Requires-Dist: scipy-openblas32>=0.3.29
License-File: LICENSE
"""
RPATH = "$ORIGIN:$ORIGIN/../../scipy_openblas32/lib"


def compile_library(folder: Path, name: str, code: str, *flags: str) -> Path:
    source, library = folder / f"{name}.c", folder / name
    source.write_text(code)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-nostartfiles", "-o", str(library), str(source), *flags], check=True
    )
    return library


def make_library(folder: Path, code: str = GOOD_CODE, rpath: str = RPATH, *flags: str) -> bytes:
    """The library of the C ABI."""
    compile_library(folder, "libscipy_openblas.so", "", "-Wl,-soname,libscipy_openblas.so")
    linked = ("-Wl,--no-as-needed", f"-L{folder}", "-lscipy_openblas", f"-Wl,-rpath,{rpath}")
    named = "-Wl,-soname,libmultigemm_cpu.so"
    return compile_library(
        folder, "libmultigemm_cpu.so", code, named, *tags(flags), *linked, *flags
    ).read_bytes()


def make_binding(folder: Path, code: str = GOOD_BINDING, rpath: str = "$ORIGIN", *flags: str) -> bytes:
    """The library that registers with torch."""
    compile_library(folder, "libtorch_cpu.so", "", "-Wl,-soname,libtorch_cpu.so")
    if not (folder / "libmultigemm_cpu.so").exists():
        make_library(folder)
    linked = ("-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu", "-lmultigemm_cpu", f"-Wl,-rpath,{rpath}")
    return compile_library(
        folder, "libmultigemm_cpu_torch.so", code, *tags(flags), *linked, *flags
    ).read_bytes()


def tags(flags: tuple[str, ...]) -> tuple[str, ...]:
    return () if "-Wl,--enable-new-dtags" in flags else ("-Wl,--disable-new-dtags",)


def make_wheel(
    folder: Path,
    library: bytes,
    info: dict[str, Any] | None = None,
    extra: dict[str, bytes] | None = None,
    tag: str = "py3-none-linux_x86_64",
    metadata: str = "",
    damage: bool = False,
    binding: bytes | None = None,
    without: str = "",
) -> Path:
    """A wheel that is good, but for what is asked for; ``metadata`` are more lines of METADATA."""
    info = INFO if info is None else info
    dist_info = "multigemm_cpu-0.1.0.dist-info"
    told = WHEEL.format(tag=tag)
    described = METADATA + metadata
    files = {
        "multigemm_cpu/__init__.py": b"",
        "multigemm_cpu/backend.json": json.dumps(info).encode(),
        "multigemm_cpu/lib/libmultigemm_cpu.so": library,
        "multigemm_cpu/lib/libmultigemm_cpu_torch.so": binding or make_binding(folder),
        f"{dist_info}/WHEEL": told.encode(),
        f"{dist_info}/METADATA": described.encode(),
        f"{dist_info}/entry_points.txt": b"[multigemm.backends]\ncpu = multigemm_cpu\n",
        f"{dist_info}/licenses/LICENSE": b"Apache-2.0",
        **(extra or {}),
    }
    files.pop(without, None)
    record = f"{dist_info}/RECORD"
    lines = [f"{record},,"]
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    path = folder / f"multigemm_cpu-0.1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, b"damaged" if damage and name.endswith("__init__.py") else data)
        wheel.writestr(record, "\n".join(lines) + "\n")
    return path
