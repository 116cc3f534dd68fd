"""ci/machine_code.py finds what it is there for: kernels that lost their tensor cores, or spill.

The text of a disassembly shows it anywhere; where nvcc and cuobjdump are, small kernels are compiled for it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from loading_kit import ci_script

SASS = """
Fatbin elf code:
================
arch = sm_90a

\tcode for sm_90a
\t\tFunction : rows_sm90_bf16
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
                                                                 /* 0x000fe20000000800 */
        /*0110*/              @!UP1 UTMALDG.2D [UR4], [UR8] ;    /* 0x00003f04080095b4 */
        /*0120*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0000000000000000 */
\t\t..........
\t\tFunction : tile_sm80<Tiling<double,false>>
        /*00a0*/                   DMMA.8x8x4 R4, R4, R6, R12 ;  /* 0x000000060404723f */
        /*00b0*/               @P0 EXIT ;                        /* 0x000000000000094d */
\t\tFunction : tile_sm80<Tiling<float,true>>
        /*00a0*/                   HMMA.1688.F32.TF32 R4, R4, R6, R12 ; /* 0x000000060404723c */
\t\tFunction : tile_sm80<Tiling<__half,false>>
        /*00a0*/                   HMMA.16816.F32 R4, R4, R6, R12 ; /* 0x000000060404723c */
"""
RESOURCES = """
arch = sm_90a
Resource usage:
 Function rows_sm90_bf16:
  REG:34 STACK:0 SHARED:17416 LOCAL:0 CONSTANT[0]:544 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function rows_sm80:
  REG:18 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:544 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# An index that is not known before the kernel runs keeps the array out of registers.
SPILLS = """
__global__ void spills(float* x, int i) {
  float kept[64];
  for (int k = 0; k < 64; ++k) kept[k] = x[k];
  for (int k = 0; k < 64; ++k) kept[(k * i) & 63] += kept[k];
  x[i] = kept[i & 63];
}
"""
CLEAN = "__global__ void clean(float* x, int i) { x[i] += 1; }\n"


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return ci_script("machine_code")


def _findings(checker: ModuleType, sass: str, architectures: tuple[str, ...] = ("sm_90a",)) -> list[str]:
    return list(checker.findings(list(checker.parse_sass(sass.splitlines())), set(), architectures))


def test_a_disassembly_is_read(checker: ModuleType) -> None:
    first, second, *_ = checker.parse_sass(SASS.splitlines())
    assert (first.architecture, first.symbol) == ("sm_90a", "rows_sm90_bf16")
    assert dict(first.opcodes) == {"LDC": 1, "UTMALDG": 1, "HGMMA": 1}
    assert dict(second.opcodes) == {"DMMA": 1, "EXIT": 1}
    usage = checker.parse_resources(RESOURCES.splitlines())
    assert usage == {("sm_90a", "rows_sm90_bf16"): (0, 34), ("sm_90a", "rows_sm80"): (16, 18)}


def test_kernels_that_are_as_they_should_be(checker: ModuleType) -> None:
    assert _findings(checker, SASS) == []


@pytest.mark.parametrize("lost", ["HGMMA", "UTMALDG", "DMMA", "HMMA.16816", "HMMA.1688."])
def test_a_lost_instruction_is_found(checker: ModuleType, lost: str) -> None:
    [line] = _findings(checker, SASS.replace(lost, "FFMA"))
    lost = lost.partition(".")[0]
    assert f"no {lost}" in line


@pytest.mark.parametrize(("together", "found"), [(1, 1), (2, 0)], ids=["one by one", "overlapped"])
def test_products_that_wait_for_each_other_are_found(checker: ModuleType, together: int, found: int) -> None:
    code = "\n".join(line for line in SASS.splitlines() if "HGMMA" in line)
    arrive, wait = (code.replace("HGMMA.64x8x16.F32.BF16", f"WARPGROUP.{w}") for w in ("ARRIVE", "DEPBAR.LE"))
    lines = _findings(checker, SASS.replace(code, "\n".join([arrive, *[code] * together, wait])))
    assert ["waits for each HGMMA" in line for line in lines] == [True] * found


@pytest.mark.parametrize("opcode", ["LDL.64", "STL"])
def test_local_memory_is_found(checker: ModuleType, opcode: str) -> None:
    [line] = _findings(checker, SASS.replace("@P0 EXIT ;", f"@P0 {opcode} [R1], R2 ;"))
    assert "in local memory, 1 instructions" in line


def test_a_stack_is_found(checker: ModuleType) -> None:
    kernels = list(checker.parse_sass(SASS.splitlines()))
    kernels[1].stack = 16
    [line] = checker.findings(kernels, set(), ["sm_90a"])
    assert "keeps 16 bytes" in line


def test_a_spill_that_was_measured_is_allowed_and_no_more(
    checker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "SPILLS", {r"sm_90a: tile_sm80<.*double": 16})
    kernels = list(checker.parse_sass(SASS.splitlines()))
    kernels[1].opcodes["STL"], kernels[1].stack = 2, 16
    assert list(checker.findings(kernels, set(), ["sm_90a"])) == []
    kernels[1].stack = 24
    assert len(list(checker.findings(kernels, set(), ["sm_90a"]))) == 1
    kernels[1].stack, kernels[0].stack = 16, 8
    assert len(list(checker.findings(kernels, set(), ["sm_90a"]))) == 1


def test_a_spill_may_be_allowed_to_one_toolkit(checker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "SPILLS", {r"^CUDA 12\.\d+ sm_90a: tile_sm80": 16})
    kernels = list(checker.parse_sass(SASS.splitlines()))
    kernels[1].opcodes["STL"], kernels[1].stack = 2, 16
    assert list(checker.findings(kernels, set(), ["sm_90a"], "12.9")) == []
    assert len(list(checker.findings(kernels, set(), ["sm_90a"], "13.0"))) == 1


def test_kernels_that_are_gone_are_found(checker: ModuleType) -> None:
    found = _findings(checker, SASS.replace("sm90", "wgmma").replace("tile", "block"))
    assert len(found) == len(checker.RULES)
    assert all(line.startswith("has no kernel") for line in found)


def test_architectures_are_those_that_are_told(checker: ModuleType) -> None:
    found = _findings(checker, SASS, ("sm_80", "sm_90a", "compute_120"))
    assert found == [f"has no code for {name}, which backend.json names" for name in ("compute_120", "sm_80")]
    assert _findings(checker, SASS, ())[0] == "has code for sm_90a, which backend.json does not name"


@pytest.mark.parametrize(("code", "spilled"), [(SPILLS, True), (CLEAN, False)], ids=["spills", "clean"])
def test_compiled_kernels(checker: ModuleType, tmp_path: Path, code: str, spilled: bool) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    if checker.tool() is None:
        pytest.skip("needs cuobjdump, which comes with nvidia-cuda-cuobjdump")
    source, library = tmp_path / "kernel.cu", tmp_path / "kernel.so"
    source.write_text(code)
    flags = ["-arch=compute_80", "-code=sm_80,compute_80", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *flags, "-o", str(library), str(source)], check=True, capture_output=True)
    kernels, ptx = checker.read(library)
    assert [kernel.architecture for kernel in kernels] == ["sm_80"]
    assert ptx == {"compute_80"}
    found = [line for line in checker.findings(kernels, ptx, ["sm_80", "compute_80"]) if "local" in line]
    assert bool(found) == spilled, found
