"""Which vendor libraries a backend meets: fake cublas and cublasLt, laid out as NVIDIA's wheels are.

Public reports behind the cases: a toolkit on LD_LIBRARY_PATH (https://github.com/pytorch/pytorch/issues/91067,
https://github.com/pytorch/pytorch/issues/103832, https://github.com/PaddlePaddle/Paddle/pull/78285), an older
cuBLAS of the same major (https://github.com/NVIDIA/cuEquivariance/issues/131), a missing library
(https://github.com/ACEsuit/mace/issues/1221), a library absent for one family of GPUs
(https://github.com/ROCm/TheRock/issues/793).
"""

import pytest
from loading_kit import CUBLAS_FOLDER, Site, ask, needed_cublas, run, vendor_libraries

# A backend that calls both libraries and can tell which copies it met.
CALLS = """
const char *fake_blas_tag(void);
const char *fake_lt_tag(void);
const char *met_blas(void) { return fake_blas_tag(); }
const char *met_lt(void) { return fake_lt_tag(); }
"""
MET = """
import ctypes
from multigemm import _dispatch
backend = _dispatch.backend_for("cuda")
met = []
for name in ("met_blas", "met_lt"):
    function = backend.handle[name]
    function.restype = ctypes.c_char_p
    met.append(function().decode())
show(met=met, steps=list(_dispatch.report("cuda")[1]), blas=[p for p in mapped() if "libcublas" in p])
"""
# The same question to the bare library: what the loader does without the front.
BARE = """
import ctypes
handle = ctypes.CDLL({path!r})
met = []
for name in ("met_blas", "met_lt"):
    function = handle[name]
    function.restype = ctypes.c_char_p
    met.append(function().decode())
show(met=met)
"""


def search_path(major, tags):
    folder = f"$ORIGIN/../../{CUBLAS_FOLDER[major]}"
    return [f"-Wl,--{'enable' if tags == 'runpath' else 'disable'}-new-dtags", f"-Wl,-rpath,{folder}"]


def backend_with_cublas(site, major, tags, direct=("lt", "blas")):
    lt, blas = site.cublas(major, "site")
    needs = [{"lt": lt, "blas": blas}[which] for which in direct]
    return site.backend(
        f"cu{major}",
        needed=needed_cublas(major),
        needs=needs,
        extra=CALLS,
        flags=search_path(major, tags) if tags else [],
    )


@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("tags", ["rpath", "runpath", None])
@pytest.mark.parametrize("direct", [("lt", "blas"), ("blas",)], ids=["both", "blas-only"])
def test_another_toolkit_on_the_search_path_loses(site, tmp_path, major, tags, direct):
    site.stub_torch(cuda=f"{major}.0").stub_front()
    backend_with_cublas(site, major, tags, direct)
    vendor_libraries(tmp_path / "toolkit", major, "foreign")
    shown = run(MET, site, env={"LD_LIBRARY_PATH": str(tmp_path / "toolkit")})
    assert shown["met"] == ["site", "site"]
    assert all(str(site.folder) in path for path in shown["blas"])
    assert len(shown["blas"]) == 2
    order = [step for step in shown["steps"] if ": opened" in step]
    assert [step.split(".so")[0] for step in order] == ["libcublasLt", "libcublas"]


@pytest.mark.parametrize(
    ("tags", "direct", "met"),
    [
        ("runpath", ("lt", "blas"), ["foreign", "foreign"]),
        ("rpath", ("blas",), ["site", "foreign"]),
        ("rpath", ("lt", "blas"), ["site", "site"]),
    ],
)
def test_why_the_front_preloads(site, tmp_path, tags, direct, met):
    """The control: the same libraries without the front meet the foreign toolkit, or a mixed pair."""
    folder = backend_with_cublas(site, 13, tags, direct)
    vendor_libraries(tmp_path / "toolkit", 13, "foreign")
    code = BARE.format(path=str(folder / "lib" / "libmultigemm_cu13.so"))
    assert run(code, site, env={"LD_LIBRARY_PATH": str(tmp_path / "toolkit")})["met"] == met


def test_libraries_in_another_site_folder_are_found(site, tmp_path):
    """As with ``--user`` and ``--target``: ``../`` leads nowhere, ``sys.path`` does."""
    site.stub_torch(cuda="13.0").stub_front()
    backend_with_cublas(site, 13, "rpath")
    other = tmp_path / "other"
    other.mkdir()
    (site.folder / "nvidia").rename(other / "nvidia")
    shown = run(MET, site, other)
    assert shown["met"] == ["site", "site"]
    assert all(path.startswith(str(other)) for path in shown["blas"])


def test_libraries_that_torch_has_loaded_are_not_loaded_again(site, tmp_path):
    lt, blas = vendor_libraries(tmp_path / "torch", 13, "torch")
    opens = f"import ctypes\nfor path in ({str(lt)!r}, {str(blas)!r}):\n    ctypes.CDLL(path)"
    site.stub_torch(cuda="13.0", on_import=opens).stub_front()
    backend_with_cublas(site, 13, "rpath")
    shown = run(MET, site)
    assert shown["met"] == ["torch", "torch"]
    assert sorted(shown["blas"]) == sorted([str(lt), str(blas)])
    assert any("already loaded from" in step and str(blas) in step for step in shown["steps"])


def test_the_other_major_of_cublas_is_left_alone(site):
    site.stub_torch(cuda="13.0").stub_front()
    site.cublas(12, "twelve")
    backend_with_cublas(site, 13, "rpath")
    shown = run(MET, site)
    assert shown["met"] == ["site", "site"]
    assert all(".so.13" in path for path in shown["blas"])


def test_a_missing_library(site):
    site.stub_torch(cuda="13.0").stub_front()
    backend_with_cublas(site, 13, "rpath")
    (site.folder / "nvidia").rename(site.folder / "gone")
    answer = ask("cuda", site)
    assert answer["error"] == "LibraryMissing"
    assert answer["mapped"] == []
    assert "needs libcublasLt.so.13, which is not there (part of nvidia-cublas)" in answer["text"]
    assert 'python -m pip install "nvidia-cublas>=13.0"' in answer["text"]
    assert any("not in any site folder" in step for step in answer["steps"])
    assert answer["texts"][0] == answer["texts"][1]
    assert answer["findings"][0][2] == "failed"
    assert "libcublasLt.so.13" in answer["findings"][0][3]


def test_a_missing_library_that_is_optional(site):
    site.stub_torch(cuda="13.0").stub_front()
    entries = needed_cublas(13)
    for entry in entries:
        entry["optional"] = True
    site.backend("cu13", needed=entries)
    assert ask("cuda", site)["name"] == "cu13"


def test_a_damaged_library(site):
    site.stub_torch(cuda="13.0").stub_front()
    backend_with_cublas(site, 13, "rpath")
    (site.folder / CUBLAS_FOLDER[13] / "libcublas.so.13").write_bytes(b"not a library")
    answer = ask("cuda", site)
    assert answer["error"] == "LibraryMissing"
    assert f"{CUBLAS_FOLDER[13]}/libcublas.so.13 cannot be opened" in answer["text"]


def test_a_damaged_backend(site):
    site.stub_torch(cuda="13.0").stub_front()
    folder = site.backend("cu13")
    (folder / "lib" / "libmultigemm_cu13.so").write_bytes(b"not a library")
    answer = ask("cuda", site)
    assert answer["error"] == "LibraryMissing"
    assert "--force-reinstall" in answer["text"]


def test_a_required_function_that_an_older_cublas_lacks(site):
    """Bound at load time, as a careless build would do it."""
    site.stub_torch(cuda="13.0").stub_front()
    lt, blas = site.cublas(13)
    site.backend(
        "cu13",
        needed=needed_cublas(13),
        needs=[lt, blas],
        extra="int cublasGemmGroupedBatchedEx(void);\nint use(void) { return cublasGemmGroupedBatchedEx(); }",
        flags=[*search_path(13, "rpath"), "-Wl,-z,now", "-Wl,--unresolved-symbols=ignore-all"],
    )
    answer = ask("cuda", site)
    assert answer["error"] == "SymbolMissing"
    assert "cublasGemmGroupedBatchedEx" in answer["text"]
    assert 'pip install "nvidia-cublas>=13.0"' in answer["text"]


@pytest.mark.parametrize("function", ["mg_query", "mg_grouped_mm", "mg_last_error"])
def test_a_function_of_the_c_abi_that_the_backend_lacks(site, function):
    site.stub_torch(cuda="13.0").stub_front().backend("cu13", without=[function])
    answer = ask("cuda", site)
    assert answer["error"] == "SymbolMissing"
    assert f"{function}_cu13" in answer["text"]


@pytest.mark.parametrize("present", [False, True])
def test_an_optional_function_switches_one_feature(site, present):
    site.stub_torch(cuda="12.8").stub_front()
    name = "cublasGemmGroupedBatchedEx"
    lt, blas = site.cublas(12, functions=[name] if present else [])
    site.backend(
        "cu12",
        needed=needed_cublas(12),
        needs=[lt, blas],
        flags=search_path(12, "rpath"),
        optional_symbols=[{"symbol": name, "feature": "grouped batched BLAS"}],
    )
    answer = ask("cuda", site)
    assert answer["name"] == "cu12"
    assert answer["warnings"] == []
    if present:
        assert answer["disabled"] == {}
    else:
        assert list(answer["disabled"]) == ["grouped batched BLAS"]
        assert name in answer["disabled"]["grouped batched BLAS"]
        assert "grouped batched BLAS is off" in answer["findings"][0][3]


@pytest.mark.parametrize(("loaded", "opens"), [(130000, False), (130100, True), (130200, True), (None, True)])
def test_the_loaded_blas_is_held_to_the_floor(site, loaded, opens):
    query = {"abi": 1} if loaded is None else {"abi": 1, "blas_version": loaded}
    site.stub_torch(cuda="13.0").stub_front()
    site.backend("cu13", min_blas=130100, query=query)
    answer = ask("cuda", site)
    if opens:
        assert answer["name"] == "cu13"
    else:
        assert answer["error"] == "LibraryMissing"
        assert "130000" in answer["text"]
        assert "130100" in answer["text"]


def test_cpu_calls_outlive_a_backend_that_cannot_be_opened(tmp_path):
    site = Site(tmp_path / "site").stub_torch().stub_front()
    needed = {"soname": "libfake_blas.so", "distribution": "fake-blas", "folder": "fake_blas/lib"}
    library = vendor_libraries(tmp_path / "elsewhere", 13, "gone")[0]
    site.backend("cpu", needed=[needed], needs=[library])
    answer = ask("cpu", site)
    assert answer["error"] is None
    assert answer["name"] is None
    [text] = answer["warnings"]
    assert "libcublasLt.so.13" in text
    assert "reference" in text
    assert answer["findings"][0][2] == "failed"
