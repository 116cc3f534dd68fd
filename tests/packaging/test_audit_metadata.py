"""The audits find what is wrong with a wheel's metadata, or with wheels beside each other.

Reports behind the checks: https://github.com/ai-dynamo/nixl/issues/1705 (two wheels that share files),
https://github.com/ACEsuit/mace/pull/1614 (metadata that allow older libraries than are needed),
https://github.com/onnx/onnx/issues/7557 (tags that free-threaded Python refuses).
"""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from loading_kit import ci_script
from wheel_kit import BLAS, COMPILER, INFO, METADATA, make_library, make_wheel

pytest.importorskip("elftools", reason="the audit reads libraries with pyelftools")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make bad libraries")
DIST_INFO = "multigemm_cpu-0.1.0.dist-info"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return ci_script("audit")


@pytest.fixture
def library(tmp_path: Path) -> bytes:
    return make_library(tmp_path)


def changed(old: str, new: str) -> dict[str, bytes]:
    assert old in METADATA
    return {f"{DIST_INFO}/METADATA": METADATA.replace(old, new).encode()}


WHEEL = f"{DIST_INFO}/WHEEL"
FAULTS = {
    "another version": (changed("Version: 0.1.0", "Version: 0.1.1"), "METADATA is of multigemm-cpu 0.1.1"),
    "another name": (changed("Name: multigemm-cpu", "Name: multigemm"), "METADATA is of multigemm 0.1.0"),
    "another Python": (changed(">=3.10", ">=3.9"), "requires Python >=3.9, all packages have to say >=3.10"),
    "no library": (
        changed("Requires-Dist: scipy-openblas32>=0.3.29\n", ""),
        "does not require scipy-openblas32",
    ),
    "an older library": (
        changed(">=0.3.29", ">=0.3.2"),
        "backend.json needs scipy-openblas32 from 0.3.29 on",
    ),
    "a stranger": (
        changed("License-File", "Requires-Dist: nvidia-nccl-cu12\nLicense-File"),
        "requires nvidia-nccl-cu12, of which backend.json needs no library",
    ),
    "no licence": (changed("License-File: LICENSE", "License-File: COPYING"), "lacks the licence"),
    "another entry point": (
        {f"{DIST_INFO}/entry_points.txt": b"[multigemm.backends]\ncpu = multigemm\n"},
        "has the entry points",
    ),
    "a tag of one Python": (
        {WHEEL: b"Root-Is-Purelib: false\nTag: cp310-abi3-linux_x86_64\n"},
        "WHEEL has the tags ['cp310-abi3-linux_x86_64']",
    ),
    "a pure wheel": (
        {WHEEL: b"Root-Is-Purelib: true\nTag: py3-none-linux_x86_64\n"},
        "WHEEL says that it is pure",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(audit: ModuleType, tmp_path: Path, library: bytes, fault: str) -> None:
    extra, finding = FAULTS[fault]
    found = list(audit.audit_wheel(make_wheel(tmp_path, library, extra=extra)))
    assert len(found) == 1 and finding in found[0], found


def test_a_file_that_lacks_is_found(audit: ModuleType, tmp_path: Path, library: bytes) -> None:
    wheel = make_wheel(tmp_path, library, without=f"{DIST_INFO}/entry_points.txt")
    assert list(audit.audit_wheel(wheel)) == [f"has no {DIST_INFO}/entry_points.txt"]
    wheel = make_wheel(tmp_path, library, without="multigemm_cpu/lib/libmultigemm_cpu.so")
    assert "lacks multigemm_cpu/lib/libmultigemm_cpu.so" in next(audit.audit_wheel(wheel))


def test_a_suffix_of_cuda_13_is_found(audit: ModuleType) -> None:
    """NVIDIA's packages of that name fail on purpose."""
    metadata = ci_script("audit_metadata")
    entry = BLAS | {"distribution": "nvidia-cublas-cu13", "min_version": "13.0"}
    message = metadata.message_from_bytes(b"Requires-Dist: nvidia-cublas-cu13>=13.0\n")
    [line] = metadata.audit_requirements(message, {**INFO, "needed": [entry]})
    assert "have no suffix" in line


def test_another_platform_than_a_releases_is_found(audit: ModuleType, tmp_path: Path, library: bytes) -> None:
    wheel = make_wheel(tmp_path, library, tag="py3-none-manylinux_2_39_x86_64")
    assert "ci/matrix.toml allows linux_x86_64" in next(audit.audit_wheel(wheel))
    wheel = make_wheel(tmp_path, library)
    found = list(audit.audit_wheel(wheel, published=True))
    assert "is for the platform linux_x86_64; ci/matrix.toml allows manylinux_2_28_x86_64" in found[0]
    assert "names the architectures ['x86-64'], a release has" in found[1]
    assert audit.main(["--published", str(wheel)]) == 1


def test_architectures_that_nobody_promised_are_found(
    audit: ModuleType, tmp_path: Path, library: bytes
) -> None:
    wheel = make_wheel(tmp_path, library, {**INFO, "architectures": ["x86-64", "x86-64-v9"]})
    [line] = audit.audit_wheel(wheel)
    assert "x86-64-v9, which ci/matrix.toml does not" in line
    [line] = audit.audit_wheel(make_wheel(tmp_path, library, {**INFO, "architectures": []}))
    assert "no architecture" in line


def test_a_wheel_over_its_budget_is_found(
    audit: ModuleType, tmp_path: Path, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path, library)
    monkeypatch.setitem(audit.MATRIX["toolkit"][""], "megabytes", 0)
    [line] = audit.audit_wheel(wheel)
    assert "the budget is 0" in line


# --- wheels beside each other ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def audit_set() -> ModuleType:
    return ci_script("audit_set")


def test_wheels_that_share_nothing_are_fine(audit_set: ModuleType, tmp_path: Path, library: bytes) -> None:
    one = audit_set.read(make_wheel(tmp_path, library))
    assert "multigemm_cpu/backend.json" in one.files and f"{DIST_INFO}/RECORD" in one.files
    other = replace(one, name="b.whl", distribution="multigemm-b", files=frozenset({"multigemm_b/x"}))
    assert list(audit_set.findings([one, other], "0.1.0")) == []


def test_a_shared_file_is_found(audit_set: ModuleType, tmp_path: Path, library: bytes) -> None:
    stray = {"nvidia/__init__.py": b""}
    one = audit_set.read(make_wheel(tmp_path, library, extra=stray))
    other = replace(one, name="b.whl", distribution="b", files=frozenset(stray))
    assert list(audit_set.findings([one, other], "0.1.0")) == [
        f"{one.name} and b.whl both install nvidia/__init__.py"
    ]


def test_wheels_of_two_releases_are_found(audit_set: ModuleType) -> None:
    def wheel(name: str, **fields: str) -> object:
        known = {"distribution": name, "version": "1.0", "commit": "a" * 40} | fields
        return audit_set.Wheel(name, files=frozenset({name}), **known)

    def found(*wheels: object, published: tuple[str, ...] = ()) -> list[str]:
        return list(audit_set.findings(wheels, "1.0", published))

    assert found(wheel("a"), wheel("b", commit="")) == []
    assert "shared/version.txt has 1.0" in found(wheel("a", version="0.9"))[0]
    assert "are of one distribution" in found(wheel("a"), wheel("b", distribution="a"))[0]
    pair = (wheel("a"), wheel("b", commit="b" * 40))
    assert found(*pair) == []
    assert "are of the commits" in found(*pair, published=("a", "b"))[0]
    assert found(wheel("a"), published=("a", "c")) == ["c is missing"]
    assert "does not say which commit" in found(wheel("a", commit="unknown"), published=("a",))[0]


# --- two builds of one wheel ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def reproduce() -> ModuleType:
    return ci_script("reproduce")


def test_two_equal_builds_have_no_difference(reproduce: ModuleType, tmp_path: Path, library: bytes) -> None:
    wheel = make_wheel(tmp_path, library)
    (tmp_path / "again").mkdir()
    again = Path(shutil.copy(wheel, tmp_path / "again"))
    assert list(reproduce.differences(wheel, again)) == []
    assert reproduce.main([str(wheel), str(again)]) == 0


def test_every_difference_of_two_builds_is_found(reproduce: ModuleType, tmp_path: Path) -> None:
    def wheel(name: str, *members: tuple[str, int, bytes]) -> Path:
        path = tmp_path / name / "a.whl"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            for member, year, data in members:
                archive.writestr(zipfile.ZipInfo(member, (year, 1, 1, 0, 0, 0)), data)
        return path

    one = wheel("one", ("a", 1990, b"1"), ("b", 1990, b"2"))
    for name, other, finding in (
        ("bytes", (("a", 1990, b"x"), ("b", 1990, b"2")), "a: other bytes"),
        ("time", (("a", 1990, b"1"), ("b", 2000, b"2")), "b: ((1990"),
        ("order", (("b", 1990, b"2"), ("a", 1990, b"1")), "another order"),
        ("member", (("a", 1990, b"1"),), "b is in one of the two only"),
    ):
        [line] = reproduce.differences(one, wheel(name, *other))
        assert finding in line, line
