"""How CUDA sources are compiled where no nvcc is: which kernels a host launches, and where they are."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "shared" / "kernels").rglob("*.cu"))


def script():
    spec = importlib.util.spec_from_file_location(
        "nvrtc_compile", ROOT / "shared" / "cmake" / "nvrtc_compile.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NVRTC = script()
NAMES = [
    (
        "_ZN2mg4sm9024__device_stub__rows_sm90I6__halfLN4cute5MajorE1EEEvNS0_9ArgumentsE",
        "_ZN2mg4sm909rows_sm90I6__halfLN4cute5MajorE1EEEvNS0_9ArgumentsE",
        "mg::sm90::rows_sm90<__half, (cute::Major)1>",
    ),
    (
        "_ZN2mg4simtL25__device_stub__group_scanENS0_9GroupScanE",
        "_ZN2mg4simtL10group_scanENS0_9GroupScanE",
        "mg::simt::group_scan",
    ),
    (
        # 1024 could be a length, were the name as long.
        "_ZN2mg5sm10024__device_stub__rows_sm90ILi1EEEvNS0_4CallE",
        "_ZN2mg5sm1009rows_sm90ILi1EEEvNS0_4CallE",
        "mg::sm100::rows_sm90<1>",
    ),
    (
        "_ZN2mg2s116__device_stub__fIXadL_Z1gvEEEEvNS0_1AENS0_1BENS0_1CENS0_1DENS0_1EENS0_1FENS0_1GENS0_1HENS0_1IE",
        "_ZN2mg2s11fIXadL_Z1gvEEEEvNS0_1AENS0_1BENS0_1CENS0_1DENS0_1EENS0_1FENS0_1GENS0_1HENS0_1IE",
        "mg::s1::f<&(g())>",
    ),
]


@pytest.mark.parametrize(("stub", "symbol", "name"), NAMES)
def test_names_of_kernels_follow_from_their_stubs(stub, symbol, name):
    assert NVRTC.without_stub(stub) == symbol
    demangled = subprocess.run(["c++filt", stub], capture_output=True, text=True, check=True).stdout.strip()
    assert demangled != stub, "this is no mangled name"
    assert NVRTC.kernel_name(demangled) == name


@pytest.mark.parametrize("symbol", ["_ZN2mg4rowsEv", "_ZN2mg99__device_stub__rowsEv"])
def test_what_is_no_stub_is_refused(symbol):
    with pytest.raises(ValueError, match=re.escape(symbol)):
        NVRTC.without_stub(symbol)


def test_there_are_sources():
    assert len(SOURCES) >= 5


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_lie_where_nvrtc_finds_them(source):
    """In a *.cuh: NVRTC reads these alone, as a *.cu also has the host's half."""
    included = NVRTC.device_source(source)
    assert re.search(r'^#include "[\w/]+\.cuh"$', included, re.MULTILINE)
    text = source.read_text(encoding="utf-8")
    assert not re.search(r"^(MG_KERNEL|__global__)|(MG_KERNEL|__global__) (static )?void", text, re.MULTILINE)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_kernels_of_an_object(tmp_path):
    source, built = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text(
        "namespace mg { template <class T> void __device_stub__rows(T) {}\n"
        "static void __device_stub__scan(int) {} void other() {}\n"
        "void use() { __device_stub__rows<float>(1); __device_stub__scan(2); } }\n"
    )
    subprocess.run(["c++", "-c", str(source), "-o", str(built)], check=True)
    assert NVRTC.kernels_of(built) == {
        "mg::rows<float>": "_ZN2mg4rowsIfEEvT_",
        "mg::scan": "_ZN2mgL4scanEi",
    }
    source.write_text("void other() {}\n")
    subprocess.run(["c++", "-c", str(source), "-o", str(built)], check=True)
    with pytest.raises(SystemExit, match="launches no kernel"):
        NVRTC.kernels_of(built)


def test_kernels_are_registered_under_the_names_that_nvrtc_gave():
    text = '.L0:\n\t.asciz\t"_ZN2mgL4scanEi"\n\t.asciz\t"_ZN2mg4rowsIfEEvT_"\n\tcall\t_ZN2mgL4scanEi\n'
    names = {"_ZN2mgL4scanEi": "_ZN2mg4scanEi", "_ZN2mg4rowsIfEEvT_": "_ZN2mg4rowsIfEEvT_"}
    found = NVRTC.renamed(text, names)
    assert found == text.replace('"_ZN2mgL4scanEi"', '"_ZN2mg4scanEi"')
    with pytest.raises(SystemExit, match="does not register _ZN2mg5otherEv"):
        NVRTC.renamed(text, {"_ZN2mg5otherEv": "_ZN2mg5otherEv"})


def test_a_missing_wheel_is_named(tmp_path):
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-nvrtc-cu12"):
        NVRTC.Toolkit(tmp_path, 12)
