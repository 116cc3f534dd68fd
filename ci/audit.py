"""Check native wheels: `python ci/audit.py [--libraries SITE_PACKAGES] [--published] WHEEL...`.

A line for each finding; exit status 1 if there is any. SITE_PACKAGES holds vendors' libraries of the oldest
version that the metadata allows: every function of theirs that a wheel needs has to be there. --published
asks for what a release has: the platform's tag and all architectures.

What is checked is what users were hit by elsewhere: libraries grafted into a wheel, a RUNPATH that
LD_LIBRARY_PATH beats, a Python symbol in a library that is to serve every Python, an unstable C++ symbol of
torch, a newer torch or C library needed than is said. ci/audit_set.py checks wheels against each other.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from audit_metadata import audit_architectures, audit_info, audit_metadata, audit_platform
from elf import Library, lacking, newer
from generate import read_matrix
from generate_wheels import toolkit_of

# Of every backend; its own vendor libraries come from backend.json.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
FUNCTIONS = (
    "mg_query",
    "mg_last_error",
    "mg_abi_sizes",
    "mg_grouped_mm",
    "mg_grouped_mm_explain",
    "mg_grouped_mm_wgrad",
    "mg_grouped_mm_wgrad_explain",
    "mg_indexed_polynomial",
    "mg_moe_route",
    "mg_moe_route_backward",
    "mg_moe_spread",
    "mg_moe_collect",
    "mg_moe_activate",
    "mg_moe_up",
    "mg_moe_up_reads_tokens",
    "mg_moe_activate_backward",
)
FUNCTIONS_GPU = ("mg_grouped_mm_plan", "mg_grouped_mm_wgrad_plan", "mg_blas_handles")
MATRIX = read_matrix()
MIN_TORCH = MATRIX["front"]["min_torch"]
# Shims that appeared after 2.10: naming one would silently raise the floor.
NEWER_SHIMS = re.compile(
    r"torch_(dtype_float8_e8m0fnu|dtype_float4_e2m1fn_x2|from_blob|tag_\w+|library_def_with_tags|exception_get_what\w*"
    r"|library_set_python_module|(new|delete)_stable_ivalue|stream_native_handle|\w*generator\w*)"
)
# Not aoti_torch_device_type_cuda: that is a number, and libtorch_cpu.so has it.
GPU = re.compile(r"(cuda|cu|hip)[A-Z]|(cublas|hipblas|rocblas)|(aoti_)?torch_(?!device_type)\w*cuda")
SHIM = re.compile(r"(aoti_)?torch_")
BLAS = re.compile(r"cublas|hipblas|rocblas")
# Of the driver and of the runtime: the first is missing on machines without a GPU, the second is linked in.
RUNTIME = re.compile(r"(__)?cu(da)?[A-Z]|hip[A-Z]|(aoti_)?torch_(?!device_type)\w*cuda")
UNSTABLE = re.compile(r"_ZNK?(St\w*)?(2at|3c10|5torch3jit)|_ZT[ISV]N?(2at|3c10)")


def torch_library() -> Path | None:
    """The libtorch_cpu.so of this environment; None without torch."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    return path if path.is_file() else None


def audit_vendor(library: Library, info: dict[str, Any], site: Path | None) -> Iterator[str]:
    """Findings about what a GPU backend's library wants of its vendor."""
    for symbol in sorted(library.undefined):
        if RUNTIME.match(symbol):
            yield f"needs {symbol}, which has to be linked in, or looked up when it is wanted"
    optional = {entry["symbol"] for entry in info["optional_symbols"]}
    for symbol in sorted(optional & library.undefined):
        yield f"needs {symbol}, which backend.json says is looked up"
    if site is None:
        return
    wanted = sorted(symbol for symbol in library.undefined if BLAS.match(symbol))
    for entry in info["needed"]:
        path = site / entry["folder"] / entry["soname"]
        if not path.is_file():
            yield f"{entry['soname']} is not in {entry['folder']} of the libraries to compare with"
            return
        wanted = lacking(path, wanted)
    for symbol in wanted:
        yield f"needs {symbol}, which no library of the oldest version has"


def audit_search_path(library: Library) -> Iterator[str]:
    """Findings about where the loader would look for what a library needs."""
    if library.runpath:
        yield f"RUNPATH is {':'.join(library.runpath)}; it must be RPATH, which LD_LIBRARY_PATH does not beat"
    if library.rpath[:1] != ["$ORIGIN"]:
        yield "RPATH does not start with $ORIGIN"
    for path in library.rpath:
        if not path.startswith("$ORIGIN"):
            yield f"RPATH has {path}, a folder of the machine that built it"


def audit_versions(library: Library, platform: str) -> Iterator[str]:
    """Findings about the age of the system that a library needs, given its wheel's platform tag."""
    promised = next(
        (p for p in (MATRIX["published"], MATRIX["local"]) if p["platform"] == platform), MATRIX["local"]
    )
    for soname, versions in sorted(library.versions.items()):
        for version in newer(versions, promised["versions"]):
            yield f"needs {version} of {soname}, newer than {promised['platform']} has"


def audit_texts(library: Library) -> Iterator[str]:
    """Findings about folders of the machine that built a library."""
    for path in sorted(library.sources):
        yield f"names {path}, a folder of the machine that built it"


def audit_torch_floor(path: Path) -> Iterator[str]:
    """Findings of torch-abi-audit, which knows when each shim of torch appeared."""
    program = shutil.which("torch-abi-audit", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("torch-abi-audit was not found: python -m pip install torch-abi-audit")
    done = subprocess.run([program, "--json", str(path)], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    floor = ".".join(map(str, MIN_TORCH))
    for library in (*told["extensions"], *told["bundled_libs"]):
        torch = library["torch"]
        found = torch["min_torch_version"]
        if not torch["stable"]:
            yield f"torch-abi-audit finds unstable symbols: {', '.join(torch['unstable_symbols'])}"
        if found is None or found.split(".")[:2] != floor.split("."):
            yield f"torch-abi-audit finds that it needs torch {found}, the metadata says {floor}"
        for symbol in torch["unknown_shim_symbols"]:
            yield f"torch-abi-audit knows no release of torch that has {symbol}"


def audit_symbols(library: Library, kind: str) -> Iterator[str]:
    """Findings about the symbols that a library wants from others."""
    for symbol in sorted(library.undefined):
        if re.match(r"_?Py[A-Z_]", symbol):
            yield f"needs the Python symbol {symbol}"
        elif UNSTABLE.match(symbol):
            yield f"needs the unstable symbol {symbol}"
        elif NEWER_SHIMS.fullmatch(symbol):
            yield f"needs {symbol}, which torch {'.'.join(map(str, MIN_TORCH))} lacks"
        elif kind == "cpu" and GPU.match(symbol):
            yield f"needs the GPU symbol {symbol}"


def audit_core(library: Library, info: dict[str, Any], site: Path | None = None) -> Iterator[str]:
    """Findings about the library of the C ABI, given its backend.json."""
    name = info["name"]
    allowed = {entry["soname"] for entry in info["needed"]}
    for soname in library.needed:
        if soname not in allowed and not SYSTEM.fullmatch(soname):
            yield f"NEEDED has {soname}, which is neither the system's nor in backend.json"
    for entry in info["needed"]:
        if entry["soname"] not in library.needed and not entry["optional"]:
            yield f"backend.json needs {entry['soname']}, but the library does not"
        if f"$ORIGIN/../../{entry['folder']}" not in library.rpath:
            yield f"RPATH lacks $ORIGIN/../../{entry['folder']}, where {entry['soname']} is installed"
    yield from audit_search_path(library)
    functions = FUNCTIONS if info["kind"] == "cpu" else FUNCTIONS + FUNCTIONS_GPU
    wanted = {f"{function}_{name}" for function in functions}
    for symbol in sorted(wanted - library.defined):
        yield f"does not export {symbol}"
    for symbol in sorted(library.defined - wanted):
        yield f"exports {symbol}, which is not in the C ABI"
    yield from audit_symbols(library, info["kind"])
    for symbol in sorted(symbol for symbol in library.undefined if SHIM.match(symbol)):
        yield f"needs {symbol}: the C ABI has to open without torch"
    if info["kind"] != "cpu":
        yield from audit_vendor(library, info, site)


def audit_binding(library: Library, info: dict[str, Any]) -> Iterator[str]:
    """Findings about the library that registers the functions with torch."""
    core = Path(info["core"]).name
    for soname in library.needed:
        if soname not in (core, "libtorch_cpu.so") and not SYSTEM.fullmatch(soname):
            yield f"NEEDED has {soname}, which is neither the system's, nor torch's, nor the wheel's own"
    if "libtorch_cpu.so" not in library.needed:
        yield "NEEDED lacks libtorch_cpu.so, so torch's symbols would not be found"
    if core not in library.needed:
        yield f"NEEDED lacks {core}, whose functions it registers"
    yield from audit_search_path(library)
    for symbol in sorted(library.defined):
        yield f"exports {symbol}; it has only to register itself"
    yield from audit_symbols(library, info["kind"])
    for symbol in sorted(library.undefined):
        if info["kind"] != "cpu" and RUNTIME.match(symbol):
            yield f"needs {symbol}, which has to be looked up when it is wanted"
    shims = {symbol for symbol in library.undefined if SHIM.match(symbol)}
    if not shims:
        yield "needs no shim of torch, so it registers nothing"
    torch = torch_library()
    for symbol in lacking(torch, sorted(shims)) if torch else ():
        yield f"needs {symbol}, which the torch of this environment lacks"


def audit_wheel(
    path: Path, site: Path | None = None, published: bool = False, floor: bool = False
) -> Iterator[str]:
    """Every finding about one wheel, compared with the vendors' libraries of a folder of packages.

    ``published`` asks for the tag and the architectures of a release, ``floor`` asks torch-abi-audit too.
    """
    parts = path.stem.split("-")
    if len(parts) != 5 or parts[2:4] != ["py3", "none"] or not re.match(r"(many)?linux", parts[4]):
        yield f"the file name's tag is {'-'.join(parts[2:])}, not py3-none-<linux or manylinux platform>"
        return
    package, platform = parts[0], parts[4]
    yield from audit_platform(platform, MATRIX, published)
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        tops = {name.split("/")[0] for name in names}
        for top in sorted(tops - {package, f"{package}-{parts[1]}.dist-info"}):
            yield f"holds {top}/: a backend owns its own folder only, and nothing may be grafted in"
        if f"{package}/backend.json" not in names:
            yield f"has no {package}/backend.json"
            return
        info = json.loads(wheel.read(f"{package}/backend.json"))
        broken = list(audit_info(info, parts[1], MATRIX))
        yield from broken
        if broken:
            return
        if package != f"multigemm_{info['name']}":
            yield f"backend.json says name {info['name']}, the package is {package}"
            return
        yield from audit_metadata(wheel, path.stem, info, MATRIX)
        (row,) = (row for row in MATRIX["backend"] if row["name"] == info["name"])
        yield from audit_architectures(info, row, published)
        budget = toolkit_of(MATRIX, row)["megabytes"] << 20
        if path.stat().st_size > budget:
            yield f"has {path.stat().st_size} bytes, the budget is {budget}"
        files = {f"{package}/{info[part]}": part for part in ("core", "library")}
        for name in names:
            if re.search(r"\.so(\.\d+)*$", name) and name not in files:
                yield f"holds a further library, {name}"
        with tempfile.TemporaryDirectory() as folder:
            for name, part in files.items():
                if name not in names:
                    yield f"lacks {name}, which backend.json names"
                    continue
                file = Path(wheel.extract(name, folder))
                library = Library(file)
                found = [*audit_versions(library, platform), *audit_texts(library)]
                found += audit_core(library, info, site) if part == "core" else audit_binding(library, info)
                if floor and part == "library":
                    found += audit_torch_floor(file)
                yield from (f"{file.name}: {finding}" for finding in found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", type=Path, metavar="SITE_PACKAGES", help="holds vendors' libraries")
    parser.add_argument("--published", action="store_true", help="ask for what a release has")
    parser.add_argument("--torch-floor", action="store_true", help="ask torch-abi-audit too")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args(arguments)
    found = [
        f"{path.name}: {line}"
        for path in options.wheels
        for line in audit_wheel(path, options.libraries, options.published, options.torch_floor)
    ]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
