"""What the install matrix relies on: stand-ins that are wheels, and an eye for lost or overwritten files."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from loading_kit import ci_script
from wheel_kit import COMPILER, make_library, make_wheel


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    return ci_script("install_kit")


def unpacked(wheel: Path, folder: Path) -> SimpleNamespace:
    """An environment that has this wheel, as far as `intact` looks."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return SimpleNamespace(site=folder)


def test_a_lost_or_overwritten_file_is_seen(kit: ModuleType, tmp_path: Path) -> None:
    wheel = kit.stand_in(tmp_path, "some-vendor", "1.2", {"vendor/lib/a.so": b"1", "vendor/lib/b.so": b"2"})
    environment = unpacked(wheel, tmp_path / "site")
    kit.Environment.intact(environment, "some-vendor")
    (tmp_path / "site" / "vendor" / "lib" / "a.so").write_bytes(b"another")
    with pytest.raises(kit.Failed, match=r"a\.so of some-vendor was overwritten"):
        kit.Environment.intact(environment, "some-vendor")
    (tmp_path / "site" / "vendor" / "lib" / "a.so").unlink()
    with pytest.raises(kit.Failed, match=r"a\.so of some-vendor is gone"):
        kit.Environment.intact(environment, "some-vendor")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make a wheel")
def test_an_older_release_differs_in_its_version_alone(kit: ModuleType, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, make_library(tmp_path))
    old = kit.as_version(wheel, tmp_path, kit.OLD)
    assert old.name == wheel.name.replace("0.1.0", kit.OLD)
    with zipfile.ZipFile(wheel) as new, zipfile.ZipFile(old) as older:
        assert {n.replace(kit.OLD, "0.1.0") for n in older.namelist()} == set(new.namelist())
        library = "multigemm_cpu/lib/libmultigemm_cpu.so"
        assert older.read(library) == new.read(library)
        info = f"multigemm_cpu-{kit.OLD}.dist-info"
        assert f"Version: {kit.OLD}\n" in older.read(f"{info}/METADATA").decode()
        assert f'"version": "{kit.OLD}"' in older.read("multigemm_cpu/backend.json").decode()
    ours = unpacked(old, tmp_path / "site")
    kit.Environment.intact(ours, "multigemm-cpu")


def test_a_command_that_fails_says_everything(kit: ModuleType) -> None:
    code = "import sys; print('seen'); print('told', file=sys.stderr); sys.exit(3)"
    with pytest.raises(kit.Failed, match=r"exit status 3\nseen\ntold"):
        kit.call([sys.executable, "-c", code])


def test_a_command_does_not_see_this_process_settings(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTHONPATH", "MULTIGEMM_BACKEND", "LD_LIBRARY_PATH", "PIP_INDEX_URL")
    for name in names:
        monkeypatch.setenv(name, "seen")
    code = f"import os; print([n for n in {names} if n in os.environ])"
    assert kit.call([sys.executable, "-c", code]).strip() == "[]"


def test_another_flavour_of_pytorch_is_claimed_in_a_folder_of_links(kit: ModuleType, tmp_path: Path) -> None:
    flavours = ci_script("install_flavours")
    packages = tmp_path / "packages"
    (packages / "torch" / "lib").mkdir(parents=True)
    (packages / "other").mkdir()
    text = "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    (packages / "torch" / "version.py").write_text(text)
    setting = kit.Setting(tmp_path, packages, tmp_path / "work")
    folder = flavours.claiming(setting, "rocm7", "a")
    told = (folder / "torch" / "version.py").read_text()
    assert "hip = '7.1.0'" in told and "cuda: Optional[str] = None" in told
    assert (folder / "torch" / "lib").is_symlink() and (folder / "other").is_symlink()
    (folder / "mark").touch()  # a case beside this one makes a folder of its own
    assert flavours.claiming(setting, "rocm7", "c") != folder and (folder / "mark").exists()
    (packages / "torch" / "version.py").write_text(text.replace("= None", "= '13.0'"))
    with pytest.raises(flavours.Failed, match="is not one for the CPU"):
        flavours.claiming(setting, "cuda12", "b")
