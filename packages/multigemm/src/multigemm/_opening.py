"""Opening a chosen backend: preload what it needs, load it, ask it who it is.

Vendor libraries are opened by full path and in the order of ``needed`` before the backend is. An RPATH
alone does not do: with another toolkit on LD_LIBRARY_PATH the loader would pair our cublas with a foreign
cublasLt. A library that is in the process already is left alone, because the loader reuses it by SONAME
whatever we open; a second copy would only cost memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ._backend import Backend
from ._errors import AbiSkew, BackendError, BrokenMetadata, LibraryMissing, SymbolMissing
from ._selection import Candidate, Failure, Front, pip_install, reinstall_line

# The C functions of a backend; each name ends in the backend's own (mg_query_cu13).
FUNCTIONS = (
    "mg_query",
    "mg_abi_sizes",
    "mg_last_error",
    "mg_grouped_mm",
    "mg_grouped_mm_explain",
    "mg_grouped_mm_wgrad",
    "mg_grouped_mm_wgrad_explain",
)


class OpeningError(Exception):
    """Carries the failure out of `open_backend`; never reaches a user."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def open_backend(candidate: Candidate, front: Front, steps: list[str]) -> Backend:
    """Open the backend for PyTorch, noting every step in ``steps``; raises `OpeningError`.

    The metadata has been checked. PyTorch is imported first: the backend links libtorch_cpu.so by SONAME
    and has no path to it.
    """
    import torch

    _described(candidate)
    _ensure_schemas()
    steps.append(f"imported PyTorch {torch.__version__}")
    operators: Any = torch.ops
    return _open(candidate, front, steps, "library", operators.load_library)


def open_core(candidate: Candidate, front: Front, steps: list[str]) -> Backend:
    """Open the backend for arrays of other libraries than PyTorch; raises `OpeningError`.

    A backend whose backend.json names a ``core`` has its C ABI in a library of its own, which needs no
    PyTorch. Any other is opened as PyTorch opens it, so PyTorch has to be installed.
    """
    info = _described(candidate)
    if "core" in info:
        return _open(candidate, front, steps, "core", ctypes.CDLL)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        cause = (
            f"backend {candidate.name} needs PyTorch installed, for arrays of other libraries too: "
            f"its one library links libtorch_cpu.so ({error})"
        )
        steps.append(f"import torch: {error}")
        floor = ".".join(str(part) for part in info["min_torch"])
        cure = pip_install(f"torch>={floor}")
        raise OpeningError(Failure(LibraryMissing, cause, cure, candidate.name)) from error
    return open_backend(candidate, front, steps)


def _described(candidate: Candidate) -> Mapping[str, Any]:
    """The backend.json of a candidate that was chosen."""
    if candidate.info is None or candidate.folder is None:
        raise OpeningError(Failure(BrokenMetadata, f"{candidate.place} cannot be read", "", candidate.name))
    return candidate.info


def _open(
    candidate: Candidate, front: Front, steps: list[str], field: str, load: Callable[[str], object]
) -> Backend:
    """Preload what the library needs, load the one that ``field`` names, and ask it who it is."""
    info, folder = _described(candidate), candidate.folder or ""
    name = candidate.name
    reinstall = reinstall_line(candidate.distribution, front.version)
    for entry in info["needed"]:
        _preload(entry, candidate, steps)

    def path_of(field: str) -> str:
        return os.path.join(folder, *info[field].split("/"))

    library = path_of(field)
    try:
        if "core" in info:
            ctypes.CDLL(path_of("core"))  # which the library for PyTorch then finds in the process
        load(library)
        handle = ctypes.CDLL(library)
    except Exception as error:
        text = _loader_text(error)
        steps.append(f"load {library}: {text}")
        raise OpeningError(_load_failure(text, candidate, reinstall)) from error
    steps.append(f"loaded {library}")

    def fail(kind: type[BackendError], cause: str, cure: str = reinstall) -> OpeningError:
        steps.append(cause)
        return OpeningError(Failure(kind, f"backend {name}: {cause}", cure, name))

    missing = [f"{function}_{name}" for function in FUNCTIONS if not _has(handle, f"{function}_{name}")]
    if missing:
        raise fail(SymbolMissing, f"{library} has no function {', '.join(missing)}")
    query = _query(handle, name)
    if query is None:
        raise fail(BrokenMetadata, f"mg_query_{name} gave no JSON object")
    steps.append(f"mg_query_{name}: {json.dumps(query, sort_keys=True)}")
    if query.get("abi") != front.abi:
        cause = (
            f"the loaded library speaks ABI {query.get('abi')}, multigemm {front.version} speaks {front.abi}"
        )
        raise fail(AbiSkew, cause)
    if query.get("version", info["version"]) != info["version"]:
        cause = f"the library is of version {query['version']}, its backend.json of {info['version']}"
        raise fail(BrokenMetadata, cause)
    loaded, floor = blas_version(query), info["min_blas"]
    if floor is not None and loaded is not None and loaded < floor:
        cause = f"the loaded BLAS has version {loaded}, the backend needs {floor} or newer"
        raise fail(LibraryMissing, cause, _vendor_cure(info) or reinstall)
    return Backend(
        name=name,
        kind=candidate.kind,
        version=candidate.version,
        folder=folder,
        library=library,
        info=info,
        query=query,
        handle=handle,
        disabled=_disabled(handle, info, steps),
    )


def _ensure_schemas() -> None:
    """Define the operators before a library registers kernels for them (a no-op after the first import)."""
    from . import ops  # noqa: F401


def blas_version(query: Mapping[str, Any]) -> int | None:
    """Return the version of the loaded BLAS as its library reports it, or None where it has none."""
    value = query.get("blas_version")
    if value is None and isinstance(query.get("blas"), Mapping):
        value = query["blas"].get("version")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _query(handle: ctypes.CDLL, name: str) -> dict[str, Any] | None:
    function = handle[f"mg_query_{name}"]
    function.restype, function.argtypes = ctypes.c_char_p, []
    answer = function()
    try:
        parsed = json.loads(answer) if answer else None
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _has(handle: ctypes.CDLL, symbol: str) -> bool:
    # Looks into the library and into everything that it needs, as dlsym does.
    try:
        handle[symbol]
    except AttributeError:
        return False
    return True


def _disabled(handle: ctypes.CDLL, info: Mapping[str, Any], steps: list[str]) -> dict[str, str]:
    disabled: dict[str, str] = {}
    for entry in info["optional_symbols"]:
        if not _has(handle, entry["symbol"]):
            disabled[entry["feature"]] = f"the loaded vendor libraries have no {entry['symbol']}"
            steps.append(f"{entry['feature']} is off: {disabled[entry['feature']]}")
    return disabled


# --- vendor libraries -----------------------------------------------------------------------------


def _places(entry: Mapping[str, Any], folder: str) -> Iterator[str]:
    """Where a needed library may lie: beside the backend, then under every entry of ``sys.path``.

    The second covers ``--user`` and ``--target`` installs, where the two wheels lie in different folders.
    """
    seen: set[str] = set()
    for root in (os.path.dirname(folder), *sys.path):
        path = os.path.join(os.path.abspath(root or os.curdir), *entry["folder"].split("/"), entry["soname"])
        if path not in seen:
            seen.add(path)
            yield path


def _preload(entry: Mapping[str, Any], candidate: Candidate, steps: list[str]) -> None:
    soname = entry["soname"]
    if in_process(soname):
        steps.append(f"{soname}: already loaded{_from(soname)}")
        return
    path = next((path for path in _places(entry, candidate.folder or "") if os.path.isfile(path)), None)
    if path is None:
        # Not yet an error: a system toolkit may provide it, and the loader knows where.
        steps.append(f"{soname}: not in any site folder ({entry['folder']}); left to the loader")
        return
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        steps.append(f"{soname}: {path} cannot be opened: {error}")
        if entry.get("optional"):
            return
        cause = f"backend {candidate.name}: {path} cannot be opened: {error}"
        raise OpeningError(Failure(LibraryMissing, cause, _cure(entry), candidate.name)) from error
    steps.append(f"{soname}: opened {path}")


def in_process(soname: str) -> bool:
    """Whether a library of this SONAME is loaded; opens nothing."""
    noload = getattr(os, "RTLD_NOLOAD", None)
    if noload is None:
        return False
    try:
        ctypes.CDLL(soname, mode=ctypes.RTLD_LOCAL | noload)
    except OSError:
        return False
    return True


def _from(soname: str) -> str:
    """Return `` from /path`` of a loaded library, or nothing where the system does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:
            for line in stream:
                path = line.rstrip("\n").partition("/")[2]
                if os.path.basename(path).startswith(soname):
                    return f" from /{path}"
    except OSError:
        pass
    return ""


def _cure(entry: Mapping[str, Any]) -> str:
    floor = entry.get("min_version")
    return pip_install(f"{entry['distribution']}>={floor}" if floor else entry["distribution"])


def _vendor_cure(info: Mapping[str, Any]) -> str | None:
    """The pip line of the first needed library that states a floor."""
    for entry in info["needed"]:
        if entry.get("min_version") and not entry.get("optional"):
            return _cure(entry)
    return None


# --- what the loader said -------------------------------------------------------------------------


def _loader_text(error: BaseException) -> str:
    """Join the texts of an error and its causes: PyTorch wraps the loader's line in its own."""
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = " ".join(str(current).split())
        if text and text not in texts:
            texts.append(text)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return ": ".join(texts) or type(error).__name__


def _load_failure(text: str, candidate: Candidate, reinstall: str) -> Failure:
    """Turn the loader's text into one cause and one cure. A pure function."""
    name, info = candidate.name, candidate.info or {}
    absent = re.search(r"([\w.+-]+\.so[\w.]*): cannot open shared object file", text)
    if absent:
        soname = absent.group(1)
        entry = next((e for e in info.get("needed", ()) if e["soname"] == soname), None)
        cause = f"backend {name} needs {soname}, which is not there"
        if entry is not None:
            return Failure(LibraryMissing, f"{cause} (part of {entry['distribution']})", _cure(entry), name)
        return Failure(LibraryMissing, f"{cause}: {text}", reinstall, name)
    symbol = re.search(r"undefined symbol: ([\w@.]+)", text)
    if symbol:
        cause = f"backend {name}: no loaded library has the function {symbol.group(1)}: {text}"
        return Failure(SymbolMissing, cause, _vendor_cure(info) or reinstall, name)
    runtime = re.search(r"version [`']([\w.]+)' not found", text)
    if runtime:
        cause = f"backend {name} needs {runtime.group(1)} of a newer C or C++ runtime: {text}"
        return Failure(LibraryMissing, cause, "use a newer system or environment (glibc, libstdc++)", name)
    return Failure(LibraryMissing, f"backend {name} cannot be loaded: {text}", reinstall, name)
