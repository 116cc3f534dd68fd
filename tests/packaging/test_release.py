"""What `nox -s release` writes: the files of a release, their checksums, and a valid bill of materials."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loading_kit import ci_script
from wheel_kit import COMPILER, METADATA, make_library, make_wheel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make a wheel")
LICENCE = "License-Expression: Apache-2.0\nSummary: A test\nRequires-Dist: rich>=13 ; extra == 'x'\n"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "built"
    folder.mkdir()
    found = make_wheel(folder, make_library(folder), metadata=LICENCE)
    (tmp_path / "wheels").mkdir()
    return Path(shutil.move(found, tmp_path / "wheels"))


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return ci_script("release")


def bill(wheel: Path) -> dict[str, Any]:
    pytest.importorskip("cyclonedx", reason="the bill of materials is written by CycloneDX's library")
    sbom = ci_script("sbom")
    told: dict[str, Any] = json.loads(sbom.text_of(sbom.bill([wheel])))
    return told


def test_checksums_are_as_sha256sum_reads_them(release: ModuleType, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "release"
    assert release.collect([wheel], out, True) == [wheel.name]
    (out / release.SUMS).write_text("old")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert release.sums(out) == f"{digest}  {wheel.name}\n"


def test_only_wheels_of_this_version_are_collected(release: ModuleType, wheel: Path, tmp_path: Path) -> None:
    old = wheel.rename(wheel.with_name(wheel.name.replace("-0.1.0-", "-0.0.9-")))
    with pytest.raises(SystemExit, match=r"is not of 0\.1\.0"):
        release.collect([old], tmp_path / "release", True)
    sdist = old.with_name("multigemm-0.1.0.tar.gz")
    sdist.write_bytes(b"")
    assert release.collect([sdist], tmp_path / "release", True) == [sdist.name]


def test_what_was_collected_before_is_gone(release: ModuleType, wheel: Path, tmp_path: Path) -> None:
    stale = tmp_path / "release" / "stale.whl"
    stale.parent.mkdir()
    stale.write_text("")
    release.collect([wheel], stale.parent, True)
    assert not stale.exists()


def test_options_of_the_session(release: ModuleType) -> None:
    assert not release.options([]).published
    given = release.options(["--wheels", "x", "--published", "--quick"])
    assert (given.wheels, given.published, given.quick, given.all_tests) == ("x", True, True, False)


def test_the_bill_names_the_wheel_and_what_is_in_it(wheel: Path) -> None:
    told = bill(wheel)
    named = {c["name"]: c for c in told["components"]}
    assert set(named) == {"multigemm-cpu", "torch", "scipy-openblas32"}  # an extra is a user's choice
    [digest] = named["multigemm-cpu"]["hashes"]
    assert digest == {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    assert named["torch"]["version"] == ci_script("sbom").pins()["torch"]
    needs = {d["ref"]: d.get("dependsOn", []) for d in told["dependencies"]}
    assert needs["release"] == ["pkg:pypi/multigemm-cpu@0.1.0"]
    assert "pkg:pypi/scipy-openblas32" in needs["pkg:pypi/multigemm-cpu@0.1.0"]


def test_the_same_wheels_give_the_same_bill(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bill(wheel)
    assert bill(wheel) == first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert bill(wheel)["metadata"]["timestamp"].startswith("1970-01-02")


def test_a_bill_that_breaks_the_schema_is_refused(wheel: Path) -> None:
    bill(wheel)
    sbom = ci_script("sbom")
    broken = sbom.bill([wheel])
    digest = sbom.HashType(alg=sbom.HashAlgorithm.SHA_256, content="no checksum")
    broken.components.add(sbom.component("x", "1", hashes=[digest]))
    with pytest.raises(SystemExit, match="breaks CycloneDX's schema"):
        sbom.text_of(broken)


def test_a_wheel_without_a_licence_expression_has_no_bill(tmp_path: Path, wheel: Path) -> None:
    pytest.importorskip("cyclonedx")
    assert "License-Expression" not in METADATA
    folder = tmp_path / "built"
    bare = make_wheel(folder, make_library(folder))
    with pytest.raises(SystemExit, match="License-Expression"):
        ci_script("sbom").bill([bare])
