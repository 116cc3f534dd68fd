"""ci/audit.py finds what it is there for: small bad wheels, made with a C compiler, are refused.

Reports behind the checks: https://github.com/ROCm/aiter/pull/5318 (grafted libraries),
https://github.com/pytorch/pytorch/issues/197404 (a newer torch than meant),
https://github.com/NVIDIA/torch-harmonics/issues/226 (an undefined C++ name of torch). Metadata are in
test_audit_metadata.py.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from loading_kit import ci_script
from wheel_kit import (
    COMPILER,
    GOOD_BINDING,
    GOOD_CODE,
    HIDDEN,
    INFO,
    RPATH,
    compile_library,
    make_binding,
    make_library,
    make_wheel,
)

pytest.importorskip("elftools", reason="the audit reads libraries with pyelftools")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make bad libraries")


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return ci_script("audit")


def _findings(audit: ModuleType, wheel: Path) -> list[str]:
    return list(audit.audit_wheel(wheel))


def test_a_good_wheel_has_no_findings(audit: ModuleType, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, make_library(tmp_path))
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
    found = _findings(
        audit, make_wheel(tmp_path, make_library(tmp_path), binding=make_binding(tmp_path, code))
    )
    assert len(found) == 1 and finding in found[0], found


def test_a_further_export_is_found(audit: ModuleType, tmp_path: Path) -> None:
    code = "int mg_x(void) { return 0; }"
    found = _findings(audit, make_wheel(tmp_path, make_library(tmp_path, GOOD_CODE + code)))
    assert found == ["libmultigemm_cpu.so: exports mg_x, which is not in the C ABI"]
    (tmp_path / "again").mkdir()
    binding = make_binding(tmp_path / "again", GOOD_BINDING + code)
    [line] = _findings(audit, make_wheel(tmp_path, make_library(tmp_path), binding=binding))
    assert "libmultigemm_cpu_torch.so: exports mg_x" in line


def test_a_core_that_needs_torch_is_found(audit: ModuleType, tmp_path: Path) -> None:
    code = f"{GOOD_CODE}extern int torch_get_num_threads(unsigned*);\n"
    code += f"{HIDDEN}int use(void) {{ return torch_get_num_threads(0); }}\n"
    [line] = _findings(audit, make_wheel(tmp_path, make_library(tmp_path, code)))
    assert "has to open without torch" in line


def test_a_binding_that_lacks_what_it_registers_is_found(audit: ModuleType, tmp_path: Path) -> None:
    binding = compile_library(
        tmp_path, "bare.so", "", "-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"
    ).read_bytes()
    found = _findings(audit, make_wheel(tmp_path, make_library(tmp_path), binding=binding))
    for text in ("NEEDED lacks libtorch_cpu.so", "NEEDED lacks libmultigemm_cpu.so", "registers nothing"):
        assert any(text in line for line in found), found


def test_a_missing_export_is_found(audit: ModuleType, tmp_path: Path) -> None:
    code = GOOD_CODE.replace("mg_query_cpu", "mg_query_cu13")
    found = _findings(audit, make_wheel(tmp_path, make_library(tmp_path, code)))
    assert "libmultigemm_cpu.so: does not export mg_query_cpu" in found
    assert "libmultigemm_cpu.so: exports mg_query_cu13, which is not in the C ABI" in found


def test_a_runpath_is_found(audit: ModuleType, tmp_path: Path) -> None:
    library = make_library(tmp_path, GOOD_CODE, RPATH, "-Wl,--enable-new-dtags")
    assert any("RUNPATH is" in line for line in _findings(audit, make_wheel(tmp_path, library)))


def test_a_path_of_the_build_machine_is_found(audit: ModuleType, tmp_path: Path) -> None:
    found = _findings(audit, make_wheel(tmp_path, make_library(tmp_path, GOOD_CODE, f"{RPATH}:/opt/blas")))
    assert found == ["libmultigemm_cpu.so: RPATH has /opt/blas, a folder of the machine that built it"]


def test_an_unknown_needed_library_is_found(audit: ModuleType, tmp_path: Path) -> None:
    compile_library(tmp_path, "libpython3.11.so", "", "-Wl,-soname,libpython3.11.so.1.0")
    library = make_library(tmp_path, GOOD_CODE, RPATH, "-lpython3.11")
    assert any("libpython3.11.so.1.0" in line for line in _findings(audit, make_wheel(tmp_path, library)))


def test_what_a_gpu_backend_must_not_need_is_found(audit: ModuleType, tmp_path: Path) -> None:
    """The driver is absent where no GPU is, and the oldest BLAS lacks what came later."""
    library = "libcublas.so.13"
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    compile_library(folder, library, "int cublasCreate_v2(void) { return 0; }", "-Wl,--hash-style=gnu")
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
    wheel = make_wheel(tmp_path, make_library(tmp_path), extra={"multigemm_cpu.libs/libgomp.so.1": b"x"})
    found = _findings(audit, wheel)
    assert any("grafted" in line for line in found)
    assert any("further library" in line for line in found)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "0.2.0"), ("min_torch", [2, 16]), ("commit", "soon"), ("needed", None), ("name", "cu13")],
)
def test_wrong_metadata_is_found(audit: ModuleType, tmp_path: Path, field: str, value: Any) -> None:
    found = _findings(audit, make_wheel(tmp_path, make_library(tmp_path), {**INFO, field: value}))
    assert any("backend.json" in line for line in found), found


def test_a_build_without_a_defence_is_found(audit: ModuleType, tmp_path: Path) -> None:
    found = _findings(audit, make_wheel(tmp_path, make_library(tmp_path), {**INFO, "without": ["guard"]}))
    assert found == ["was built without its guard: such a build is for tests alone"]
    whole = make_wheel(tmp_path, make_library(tmp_path), {**INFO, "without": []})
    assert _findings(audit, whole) == []


def test_other_wheel_faults_are_found(audit: ModuleType, tmp_path: Path) -> None:
    library = make_library(tmp_path)
    assert any(
        "tag" in x for x in _findings(audit, make_wheel(tmp_path, library, tag="cp310-abi3-linux_x86_64"))
    )
    wheel = make_wheel(tmp_path, library, metadata="Requires-Dist: torch>=2.10\n")
    assert any("requires torch" in x for x in _findings(audit, wheel))
    wheel = make_wheel(tmp_path, library, damage=True)
    assert any("another hash" in x for x in _findings(audit, wheel))
    assert audit.main([str(wheel)]) == 1


def test_a_newer_system_than_the_tag_says_is_found(audit: ModuleType, tmp_path: Path) -> None:
    """A function of glibc 2.34 in a wheel that promises to run on 2.28, and in one that does not."""
    code = f"{GOOD_CODE}extern int timer_create(void*, void*, void*);\n"
    code += f"{HIDDEN}int use(void) {{ return timer_create(0, 0, 0); }}\n"
    library, binding = make_library(tmp_path, code, RPATH, "-lc"), make_binding(tmp_path)
    if "GLIBC_2.34" not in audit.Library(tmp_path / "libmultigemm_cpu.so").versions.get("libc.so.6", ()):
        pytest.skip("this C library is older than 2.34")
    tag = f"py3-none-{audit.MATRIX['published']['platform']}"
    found = _findings(audit, make_wheel(tmp_path, library, tag=tag, binding=binding))
    wanted = "libmultigemm_cpu.so: needs GLIBC_2.34 of libc.so.6, newer than manylinux_2_28_x86_64 has"
    assert found == [wanted]
    assert _findings(audit, make_wheel(tmp_path, library, binding=binding)) == []


def test_versions_are_compared_as_numbers(audit: ModuleType) -> None:
    floors = {"GLIBC": "2.28", "GLIBCXX": "3.4.24"}
    assert (
        audit.newer(["GLIBC_2.4", "GLIBC_2.28", "GLIBCXX_3.4.9", "GLIBC_PRIVATE", "other_9.9"], floors) == []
    )
    assert audit.newer(["GLIBC_2.100", "GLIBCXX_3.4.25"], floors) == ["GLIBCXX_3.4.25", "GLIBC_2.100"]


def test_a_folder_of_the_build_machine_in_a_text_is_found(audit: ModuleType, tmp_path: Path) -> None:
    text = '{0}const char* where(void) {{ return "{1}"; }}\n'
    code = GOOD_CODE + text.format(HIDDEN, "/srv/build/shared/launch/a.cpp")
    code += text.replace("where", "fine").format(HIDDEN, "shared/launch/b.cpp")
    [line] = _findings(audit, make_wheel(tmp_path, make_library(tmp_path, code)))
    assert (
        line
        == "libmultigemm_cpu.so: names /srv/build/shared/launch/a.cpp, a folder of the machine that built it"
    )


def test_a_newer_torch_is_found_by_the_tool_that_knows_them(audit: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch_abi_audit", reason="the audit asks torch-abi-audit")
    make_binding(tmp_path)
    assert list(audit.audit_torch_floor(tmp_path / "libmultigemm_cpu_torch.so")) == []
    code = f"{GOOD_BINDING}extern int torch_from_blob(void);\n"
    code += f"{HIDDEN}int also(void) {{ return torch_from_blob(); }}\n"
    make_binding(tmp_path, code)
    [line] = audit.audit_torch_floor(tmp_path / "libmultigemm_cpu_torch.so")
    assert "needs torch 2.11" in line
