"""ci/cpu_code.py finds a level of x86-64 that metadata name and the library lacks, or the other way round.

Report behind it: https://github.com/vllm-project/vllm/issues/20748 (no code for the machine).
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from loading_kit import ci_script
from wheel_kit import COMPILER, GOOD_CODE, HIDDEN, INFO, make_library, make_wheel

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are of x86-64"),
    pytest.mark.skipif(not (COMPILER and shutil.which("objdump")), reason="needs a C compiler and objdump"),
]
LEVELS = {
    "x86-64": "mulps %xmm0, %xmm1",
    "x86-64-v3": "vfmadd231ps %ymm0, %ymm1, %ymm2",
    "x86-64-v4": "vfmadd231pd %zmm0, %zmm1, %zmm2",
}


@pytest.fixture(scope="module")
def cpu_code() -> ModuleType:
    return ci_script("cpu_code")


def wheel(folder: Path, compiled: tuple[str, ...], named: tuple[str, ...]) -> Path:
    body = " ".join(f'__asm__("{LEVELS[name]}");' for name in compiled)
    code = f"{GOOD_CODE}{HIDDEN}void levels(void) {{ {body} }}\n"
    return make_wheel(folder, make_library(folder, code), {**INFO, "architectures": list(named)})


def test_a_wheel_that_has_what_it_names_is_fine(cpu_code: ModuleType, tmp_path: Path) -> None:
    path = wheel(tmp_path, tuple(LEVELS), tuple(LEVELS))
    assert list(cpu_code.check_wheel(path)) == []
    assert cpu_code.main([str(path)]) == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_lacks_is_found(cpu_code: ModuleType, tmp_path: Path, level: str) -> None:
    compiled = tuple(name for name in LEVELS if name != level)
    path = wheel(tmp_path, compiled, tuple(LEVELS))
    assert list(cpu_code.check_wheel(path)) == [f"has no code for {level}, which backend.json names"]
    assert cpu_code.main([str(path)]) == 1


def test_a_level_that_is_not_named_is_found(cpu_code: ModuleType, tmp_path: Path) -> None:
    [line] = cpu_code.check_wheel(wheel(tmp_path, tuple(LEVELS), ("x86-64", "x86-64-v3")))
    assert line == "has code for x86-64-v4, which backend.json does not name"


def test_a_level_that_nobody_knows_is_found(cpu_code: ModuleType) -> None:
    [line] = cpu_code.findings("mulps %xmm0,%xmm1", ["x86-64", "x86-64-v9"])
    assert "nothing is known of x86-64-v9" in line
