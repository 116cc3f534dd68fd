"""ci/audit.py finds what it is there for: small bad wheels, made with a C compiler, are refused.

Reports behind the checks: https://github.com/ROCm/aiter/pull/5318 (grafted libraries),
https://github.com/pytorch/pytorch/issues/197404 (a newer torch than meant),
https://github.com/NVIDIA/torch-harmonics/issues/226 (an undefined C++ name of torch).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from loading_kit import ci_script

pytest.importorskip("elftools", reason="the audit reads libraries with pyelftools")
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make bad libraries")

FUNCTIONS = (
    "mg_query",
    "mg_last_error",
    "mg_abi_sizes",
    "mg_grouped_mm",
    "mg_grouped_mm_explain",
    "mg_grouped_mm_wgrad",
    "mg_grouped_mm_wgrad_explain",
)
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
RPATH = "$ORIGIN:$ORIGIN/../../scipy_openblas32/lib"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return ci_script("audit")


def _compile(folder: Path, name: str, code: str, *flags: str) -> Path:
    source, library = folder / f"{name}.c", folder / name
    source.write_text(code)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-nostartfiles", "-o", str(library), str(source), *flags], check=True
    )
    return library


def _library(folder: Path, code: str = GOOD_CODE, rpath: str = RPATH, *flags: str) -> bytes:
    """The library of the C ABI."""
    _compile(folder, "libscipy_openblas.so", "", "-Wl,-soname,libscipy_openblas.so")
    linked = ("-Wl,--no-as-needed", f"-L{folder}", "-lscipy_openblas", f"-Wl,-rpath,{rpath}")
    named = "-Wl,-soname,libmultigemm_cpu.so"
    return _compile(folder, "libmultigemm_cpu.so", code, named, *_tags(flags), *linked, *flags).read_bytes()


def _binding(folder: Path, code: str = GOOD_BINDING, rpath: str = "$ORIGIN", *flags: str) -> bytes:
    """The library that registers with torch."""
    _compile(folder, "libtorch_cpu.so", "", "-Wl,-soname,libtorch_cpu.so")
    if not (folder / "libmultigemm_cpu.so").exists():
        _library(folder)
    linked = ("-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu", "-lmultigemm_cpu", f"-Wl,-rpath,{rpath}")
    return _compile(folder, "libmultigemm_cpu_torch.so", code, *_tags(flags), *linked, *flags).read_bytes()


def _tags(flags: tuple[str, ...]) -> tuple[str, ...]:
    return () if "-Wl,--enable-new-dtags" in flags else ("-Wl,--disable-new-dtags",)


def _wheel(
    folder: Path,
    library: bytes,
    info: dict[str, Any] | None = None,
    extra: dict[str, bytes] | None = None,
    tag: str = "py3-none-linux_x86_64",
    metadata: str = "",
    damage: bool = False,
    binding: bytes | None = None,
) -> Path:
    files = {
        "multigemm_cpu/__init__.py": b"",
        "multigemm_cpu/backend.json": json.dumps(info or INFO).encode(),
        "multigemm_cpu/lib/libmultigemm_cpu.so": library,
        "multigemm_cpu/lib/libmultigemm_cpu_torch.so": binding or _binding(folder),
        "multigemm_cpu-0.1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n".encode(),
        "multigemm_cpu-0.1.0.dist-info/METADATA": f"Name: multigemm-cpu\nVersion: 0.1.0\n{metadata}".encode(),
        **(extra or {}),
    }
    record = "multigemm_cpu-0.1.0.dist-info/RECORD"
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


def _findings(audit: ModuleType, wheel: Path) -> list[str]:
    return list(audit.audit_wheel(wheel))


def test_a_good_wheel_has_no_findings(audit: ModuleType, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, _library(tmp_path))
    assert _findings(audit, wheel) == []
    assert audit.main([str(wheel)]) == 0


@pytest.mark.parametrize(
    ("declared", "finding"),
    [
        ("PyLong_FromLong", "needs the Python symbol PyLong_FromLong"),
        ("_ZN2at5emptyEv", "needs the unstable symbol"),
        ("torch_from_blob", "which torch 2.10 lacks"),
        ("torch_no_such", "which the torch of this environment lacks"),
        ("cudaMalloc", "needs the GPU symbol"),
    ],
)
def test_a_wrong_symbol_is_found(audit: ModuleType, tmp_path: Path, declared: str, finding: str) -> None:
    if "this environment" in finding and audit.torch_library() is None:
        pytest.skip("no torch in this environment to compare with")
    code = f"{GOOD_BINDING}extern int {declared}(void);\n{HIDDEN}int also(void) {{ return {declared}(); }}\n"
    found = _findings(audit, _wheel(tmp_path, _library(tmp_path), binding=_binding(tmp_path, code)))
    assert len(found) == 1 and finding in found[0], found


def test_a_further_export_is_found(audit: ModuleType, tmp_path: Path) -> None:
    code = "int mg_x(void) { return 0; }"
    found = _findings(audit, _wheel(tmp_path, _library(tmp_path, GOOD_CODE + code)))
    assert found == ["libmultigemm_cpu.so: exports mg_x, which is not in the C ABI"]
    (tmp_path / "again").mkdir()
    binding = _binding(tmp_path / "again", GOOD_BINDING + code)
    [line] = _findings(audit, _wheel(tmp_path, _library(tmp_path), binding=binding))
    assert "libmultigemm_cpu_torch.so: exports mg_x" in line


def test_a_core_that_needs_torch_is_found(audit: ModuleType, tmp_path: Path) -> None:
    code = f"{GOOD_CODE}extern int torch_get_num_threads(unsigned*);\n"
    code += f"{HIDDEN}int use(void) {{ return torch_get_num_threads(0); }}\n"
    [line] = _findings(audit, _wheel(tmp_path, _library(tmp_path, code)))
    assert "has to open without torch" in line


def test_a_binding_that_lacks_what_it_registers_is_found(audit: ModuleType, tmp_path: Path) -> None:
    binding = _compile(tmp_path, "bare.so", "", "-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN").read_bytes()
    found = _findings(audit, _wheel(tmp_path, _library(tmp_path), binding=binding))
    for text in ("NEEDED lacks libtorch_cpu.so", "NEEDED lacks libmultigemm_cpu.so", "registers nothing"):
        assert any(text in line for line in found), found


def test_a_missing_export_is_found(audit: ModuleType, tmp_path: Path) -> None:
    code = GOOD_CODE.replace("mg_query_cpu", "mg_query_cu13")
    found = _findings(audit, _wheel(tmp_path, _library(tmp_path, code)))
    assert "libmultigemm_cpu.so: does not export mg_query_cpu" in found
    assert "libmultigemm_cpu.so: exports mg_query_cu13, which is not in the C ABI" in found


def test_a_runpath_is_found(audit: ModuleType, tmp_path: Path) -> None:
    library = _library(tmp_path, GOOD_CODE, RPATH, "-Wl,--enable-new-dtags")
    assert any("RUNPATH is" in line for line in _findings(audit, _wheel(tmp_path, library)))


def test_a_path_of_the_build_machine_is_found(audit: ModuleType, tmp_path: Path) -> None:
    found = _findings(audit, _wheel(tmp_path, _library(tmp_path, GOOD_CODE, f"{RPATH}:/opt/blas")))
    assert found == ["libmultigemm_cpu.so: RPATH has /opt/blas, a folder of the machine that built it"]


def test_an_unknown_needed_library_is_found(audit: ModuleType, tmp_path: Path) -> None:
    _compile(tmp_path, "libpython3.11.so", "", "-Wl,-soname,libpython3.11.so.1.0")
    library = _library(tmp_path, GOOD_CODE, RPATH, "-lpython3.11")
    assert any("libpython3.11.so.1.0" in line for line in _findings(audit, _wheel(tmp_path, library)))


def test_what_a_gpu_backend_must_not_need_is_found(audit: ModuleType, tmp_path: Path) -> None:
    """The driver is absent where no GPU is, and the oldest BLAS lacks what came later."""
    library = "libcublas.so.13"
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    _compile(folder, library, "int cublasCreate_v2(void) { return 0; }", "-Wl,--hash-style=gnu")
    info = {
        "needed": [{"soname": library, "folder": "nvidia/cu13/lib"}],
        "optional_symbols": [{"symbol": "cublasLater", "feature": "it"}],
    }

    def found(*undefined: str) -> list[str]:
        return list(audit.audit_vendor(SimpleNamespace(undefined=set(undefined)), info, tmp_path))

    assert found("cublasCreate_v2", "memcpy") == []
    assert found("cublasNew") == ["needs cublasNew, which no library of the oldest version has"]
    assert "backend.json says is looked up" in found("cublasLater")[0]
    for symbol in ("cuTensorMapEncodeTiled", "cudaMalloc", "aoti_torch_get_current_cuda_stream"):
        assert "looked up when it is wanted" in found(symbol)[0]


def test_a_grafted_library_is_found(audit: ModuleType, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, _library(tmp_path), extra={"multigemm_cpu.libs/libgomp.so.1": b"x"})
    found = _findings(audit, wheel)
    assert any("grafted" in line for line in found)
    assert any("further library" in line for line in found)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "0.2.0"), ("min_torch", [2, 16]), ("commit", "soon"), ("needed", None), ("name", "cu13")],
)
def test_wrong_metadata_is_found(audit: ModuleType, tmp_path: Path, field: str, value: Any) -> None:
    found = _findings(audit, _wheel(tmp_path, _library(tmp_path), {**INFO, field: value}))
    assert any("backend.json" in line for line in found), found


def test_other_wheel_faults_are_found(audit: ModuleType, tmp_path: Path) -> None:
    library = _library(tmp_path)
    assert any("tag" in x for x in _findings(audit, _wheel(tmp_path, library, tag="cp310-abi3-linux_x86_64")))
    wheel = _wheel(tmp_path, library, metadata="Requires-Dist: torch>=2.10\n")
    assert any("requires torch" in x for x in _findings(audit, wheel))
    wheel = _wheel(tmp_path, library, damage=True)
    assert any("another hash" in x for x in _findings(audit, wheel))
    assert audit.main([str(wheel)]) == 1
