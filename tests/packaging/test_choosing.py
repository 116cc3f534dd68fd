"""Installed backends in fake site folders, a stub PyTorch, one process for each case.

Public reports behind the cases: two wheels of two CUDA majors at once
(https://github.com/gpustack/gpustack/issues/5459, https://github.com/ai-dynamo/nixl/pull/1578), a wheel for
the other major (https://github.com/NVIDIA/cuEquivariance/issues/193), loose version pins
(https://github.com/ma-gilles/recovar/issues/64), a newer plugin that crashed an older front
(https://github.com/jax-ml/jax/issues/24901), a ROCm user with a CUDA wheel
(https://github.com/vllm-project/vllm/issues/44660), ROCm majors read as numbers
(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2014).
"""

import importlib.metadata
import json
import zipfile

import pytest
from loading_kit import FRONT, Site, ask, run, start


@pytest.fixture
def cuda13(site):
    return site.stub_torch("2.13.0+cu130", cuda="13.0").stub_front()


@pytest.fixture
def cpu(site):
    return site.stub_torch("2.13.0+cpu").stub_front()


def refused_before_loading(answer, error):
    assert answer["error"] == error
    assert answer["opened"] == []
    assert answer["mapped"] == []
    # The second call shows what the first one showed.
    assert len(answer["texts"]) == 2
    assert answer["texts"][0] == answer["texts"][1]
    assert "multigemm doctor" in answer["text"]
    assert "PyTorch 2.13.0" in answer["text"]


def test_nothing_installed_on_a_gpu(cuda13):
    answer = ask("cuda", cuda13)
    refused_before_loading(answer, "NotInstalled")
    assert 'python -m pip install "multigemm[cu13]==0.1.0"' in answer["text"]
    assert answer["text"].count("pip install") == 1
    assert "no backend is installed" in answer["text"]


def test_nothing_installed_on_the_cpu_is_silent(cpu):
    answer = ask("cpu", cpu)
    assert answer["error"] is None
    assert answer["name"] is None
    assert answer["warnings"] == []


@pytest.mark.parametrize(("version", "name"), [("12.8", "cu12"), ("13.0", "cu13")])
def test_of_two_majors_the_matching_one_is_opened(site, version, name):
    site.stub_torch(cuda=version).stub_front()
    folders = {each: site.backend(each) for each in ("cu12", "cu13")}
    answer = ask("cuda", site)
    assert answer["name"] == name
    assert answer["folder"] == str(folders[name])
    assert answer["opened"] == [str(folders[name] / "lib" / f"libmultigemm_{name}.so")]
    assert answer["mapped"] == answer["opened"]
    verdicts = {row[0]: (row[2], row[4]) for row in answer["findings"]}
    other = "cu12" if name == "cu13" else "cu13"
    assert verdicts == {name: ("opened", True), other: ("refused", False)}


def test_the_wrong_major_is_told_before_anything_is_opened(cuda13):
    folder = cuda13.backend("cu12")
    answer = ask("cuda", cuda13)
    refused_before_loading(answer, "FlavourMismatch")
    assert f"cu12 0.1.0 in {folder}" in answer["text"]
    assert "built for CUDA 12" in answer["text"]
    assert "CUDA 13.0" in answer["text"]
    assert 'pip install "multigemm[cu13]==0.1.0"' in answer["text"]


def test_one_name_in_two_folders(cuda13, tmp_path):
    other = Site(tmp_path / "other")
    folders = [cuda13.backend("cu13"), other.backend("cu13", version="0.0.9")]
    answer = ask("cuda", cuda13, other)
    refused_before_loading(answer, "Ambiguous")
    for folder, version in zip(folders, ("0.1.0", "0.0.9"), strict=True):
        assert f"{folder} (version {version})" in answer["text"]
    assert "pip uninstall multigemm-cu13" in answer["text"]


def test_one_folder_reached_twice_is_one_backend(cuda13, tmp_path):
    cuda13.backend("cu13")
    (tmp_path / "lib64").symlink_to(cuda13.folder)
    answer = ask("cuda", cuda13, tmp_path / "lib64", cuda13)
    assert answer["name"] == "cu13"
    assert len(answer["findings"]) == 1


@pytest.mark.parametrize("version", ["7.14.60850", "10.0.1"])
def test_rocm_with_cuda_backends_only(site, version):
    site.stub_torch("2.13.0+rocm", hip=version).stub_front()
    site.backend("cu12")
    site.backend("cu13")
    answer = ask("cuda", site)
    refused_before_loading(answer, "FlavourMismatch")
    assert f"ROCm {version}" in answer["text"]
    assert answer["text"].count("found:") == 2
    assert ("multigemm[rocm]==0.1.0" in answer["text"]) == version.startswith("7.")


def test_rocm_takes_the_rocm_backend(site):
    site.stub_torch("2.13.0+rocm", hip="7.2.53211-e1a6bc5663").stub_front()
    site.backend("cu13")
    site.backend("rocm")
    assert ask("cuda", site)["name"] == "rocm"


def test_another_version(cuda13):
    cuda13.backend("cu13", version="0.2.0")
    answer = ask("cuda", cuda13)
    refused_before_loading(answer, "VersionSkew")
    assert "0.2.0" in answer["text"]
    assert "multigemm 0.1.0" in answer["text"]
    assert 'pip install "multigemm-cu13==0.1.0"' in answer["text"]


@pytest.mark.parametrize("skew", [{"protocol": 2}, {"abi": 2}])
def test_another_protocol_or_abi_is_not_opened(cuda13, skew):
    cuda13.backend("cu13", **skew)
    refused_before_loading(ask("cuda", cuda13), "AbiSkew")


@pytest.mark.parametrize(
    "fault", [{"protocol": 2}, {"abi": 2}, {"version": "0.2.0"}, {"min_torch": [2, 99]}, {"min_blas": "x"}]
)
def test_cpu_calls_outlive_every_skew(cpu, fault):
    cpu.backend("cpu", **fault)
    answer = ask("cpu", cpu)
    assert answer["error"] is None
    assert answer["name"] is None
    assert answer["opened"] == []
    assert answer["mapped"] == []
    [text] = answer["warnings"]
    assert "reference" in text
    assert "cause:" in text
    assert "fix:" in text
    assert "pip install" in text


def test_a_newer_protocol_may_hold_anything(cpu):
    folder = cpu.backend("cpu")
    (folder / "backend.json").write_text('{"protocol": 2, "kind": "cpu", "library": 7}')
    answer = ask("cpu", cpu)
    assert answer["error"] is None
    assert "protocol 2" in answer["warnings"][0]


def test_the_library_has_the_last_word_on_its_abi(cuda13):
    cuda13.backend("cu13", query={"abi": 3})
    answer = ask("cuda", cuda13)
    assert answer["error"] == "AbiSkew"
    assert "ABI 3" in answer["text"]
    assert answer["findings"][0][2] == "failed"


def test_a_library_of_another_build_is_told(cuda13):
    cuda13.backend("cu13", query={"abi": 1, "version": "0.0.9"})
    answer = ask("cuda", cuda13)
    assert answer["error"] == "BrokenMetadata"
    assert "0.0.9" in answer["text"]


@pytest.mark.parametrize("query", ["no json", "[1]"])
def test_an_answer_that_is_no_object(cuda13, query):
    cuda13.backend("cu13", query=query)
    answer = ask("cuda", cuda13)
    assert answer["error"] == "BrokenMetadata"
    assert "mg_query_cu13" in answer["text"]


def damage_json(folder):
    (folder / "backend.json").write_text('{"protocol": 1,')


def damage_encoding(folder):
    (folder / "backend.json").write_bytes(b"\xff\xfe{}")


def drop_json(folder):
    (folder / "backend.json").unlink()


def drop_package(folder):
    folder.rename(folder.with_name("gone"))


def drop_library(folder):
    next((folder / "lib").iterdir()).unlink()


def mix_versions(folder):
    info = json.loads((folder / "backend.json").read_text())
    (folder / "backend.json").write_text(json.dumps({**info, "version": "0.0.9"}))


def leave_the_folder(folder):
    info = json.loads((folder / "backend.json").read_text())
    (folder / "backend.json").write_text(json.dumps({**info, "library": "../../evil.so"}))


DAMAGE = [
    damage_json, damage_encoding, drop_json, drop_package, drop_library, mix_versions, leave_the_folder,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_broken_installations(site, damage, device):
    site.stub_torch(cuda="13.0").stub_front()
    damage(site.backend("cu13" if device == "cuda" else "cpu"))
    answer = ask(device, site)
    if device == "cuda":
        refused_before_loading(answer, "BrokenMetadata")
        assert "--force-reinstall" in answer["text"]
    else:
        assert answer["error"] is None
        assert answer["opened"] == []
        assert len(answer["warnings"]) == 1
        assert "--force-reinstall" in answer["warnings"][0]


def test_a_stale_record_beside_a_sound_installation_does_no_harm(cuda13, tmp_path):
    cuda13.backend("cu13")
    cuda13.record("cu13", "0.0.9")  # same folder, an older version's leftover
    Site(tmp_path / "other").record("cu13", "0.0.8")  # another folder, no package
    assert ask("cuda", cuda13, tmp_path / "other")["name"] == "cu13"


def test_a_damaged_record_of_another_package_does_no_harm(cuda13):
    cuda13.backend("cu13")
    cuda13.write("strange-1.0.dist-info/entry_points.txt", "multigemm.backends\n===\n")
    cuda13.write("odd-1.0.dist-info/METADATA", "")
    (cuda13.folder / "odd-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff multigemm.backends")
    assert ask("cuda", cuda13)["name"] == "cu13"


@pytest.mark.parametrize("pin", ["cu12", "cu13", "rocm", "cpu", "none", "cu99"])
def test_a_pin_lifts_no_check(cuda13, pin):
    cuda13.backend("cu12")
    cuda13.backend("cu13")
    answer = ask("cuda", cuda13, env={"MULTIGEMM_BACKEND": pin})
    if pin == "cu13":
        assert answer["name"] == "cu13"
    else:
        refused_before_loading(answer, "FlavourMismatch" if pin == "cu12" else "NotInstalled")


def test_another_major_is_opened_when_both_variables_ask_for_it(cuda13):
    folder = cuda13.backend("cu12")
    cuda13.backend("cu13")
    answer = ask("cuda", cuda13, env={"MULTIGEMM_BACKEND": "cu12", "MULTIGEMM_ANY_CUDA": "1"})
    assert (answer["name"], answer["warnings"]) == ("cu12", [])
    assert answer["mapped"] == [str(folder / "lib" / "libmultigemm_cu12.so")]
    [reason] = [row[3] for row in answer["findings"] if row[0] == "cu12"]
    assert "built for CUDA 12, while this PyTorch is built for CUDA 13.0" in reason and "is open" in reason


def test_the_fallback_is_opt_in_and_warns_once(cuda13):
    cuda13.backend("cu12")
    answer = ask("cuda", cuda13, env={"MULTIGEMM_FALLBACK": "torch"})
    assert answer["error"] is None
    assert answer["name"] is None
    assert answer["opened"] == []
    [text] = answer["warnings"]
    assert "slower torch reference" in text
    assert "CUDA 12" in text


def test_a_misspelt_fallback_is_told(cuda13):
    answer = ask("cuda", cuda13, env={"MULTIGEMM_FALLBACK": "1"})
    refused_before_loading(answer, "NotInstalled")
    assert "MULTIGEMM_FALLBACK=1 is not understood" in answer["text"]


def test_cpu_calls_never_open_a_gpu_backend(cuda13):
    cuda13.backend("cu13")
    answer = ask("cpu", cuda13)
    assert answer["name"] is None
    assert answer["opened"] == []
    assert answer["warnings"] == []
    assert answer["findings"] == [["cu13", "0.1.0", "accepted", "fits", False]]


def test_devices_without_any_backend_cost_no_scan(cuda13):
    code = """
import importlib.metadata
def scanned(*args, **kwargs):
    raise AssertionError("scanned")
importlib.metadata.distributions = scanned
from multigemm import _dispatch
show(answers=[_dispatch.backend_for(device) for device in ("mps", "xpu", "npu", "hpu", "meta")])
"""
    assert run(code, cuda13)["answers"] == [None] * 5


def test_findings_import_no_torch_and_open_nothing(cuda13):
    cuda13.backend("cu12")
    cuda13.backend("cu13")
    code = """
from multigemm import _dispatch
found = [[f.backend, f.kind, f.verdict, f.opened] for f in _dispatch.findings()]
show(found=found, torch="torch" in sys.modules, mapped=[p for p in mapped() if "multigemm" in p])
"""
    shown = run(code, cuda13)
    assert sorted(shown["found"]) == [["cu12", "cuda", "refused", False], ["cu13", "cuda", "accepted", False]]
    assert shown["torch"] is False
    assert shown["mapped"] == []


def test_findings_without_torch(site):
    site.stub_front().backend("cpu")
    code = """
from multigemm import _dispatch
show(found=[[f.backend, f.verdict, f.reason] for f in _dispatch.findings()])
"""
    assert run(code, site)["found"] == [["cpu", "refused", "PyTorch is not installed"]]


def test_forget_asks_again(cpu):
    code = """
from multigemm import _dispatch
first = _dispatch.backend_for("cpu").name
_dispatch.forget()
import os
os.environ["MULTIGEMM_BACKEND"] = "none"
show(first=first, second=_dispatch.backend_for("cpu"), report=_dispatch.report("cpu")[0])
"""
    cpu.backend("cpu")
    shown = run(code, cpu)
    assert shown["first"] == "cpu"
    assert shown["second"] is None
    assert "reference" in shown["report"]


def test_a_warning_turned_into_an_error_hits_one_call_only(cpu):
    cpu.backend("cpu", abi=2)
    code = """
from multigemm import _dispatch
warnings.simplefilter("error")
try:
    _dispatch.backend_for("cpu")
    raised = False
except RuntimeWarning:
    raised = True
show(raised=raised, second=_dispatch.backend_for("cpu"))
"""
    assert run(code, cpu) == {"raised": True, "second": None}


def test_wheels_installed_and_removed_by_pip(cuda13, tmp_path):
    """Real wheel files through a real installer: removing one backend leaves the other whole
    (https://github.com/ai-dynamo/nixl/issues/1705)."""
    build, home = Site(tmp_path / "build"), Site(tmp_path / "home")
    for name in ("cu12", "cu13"):
        build.backend(name)
        wheel = tmp_path / f"multigemm_{name}-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in sorted(build.folder.glob(f"multigemm_{name}*/**/*")):
                if path.is_file():
                    archive.write(path, path.relative_to(build.folder))
    code = """
import runpy, sys
sys.argv = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check",
            "--target", {home!r}, *{wheels!r}]
runpy.run_module("pip", run_name="__main__")
"""
    wheels = [str(wheel) for wheel in sorted(tmp_path.glob("*.whl"))]
    # Not imported: what setuptools hooks into that import warns where distutils was loaded before.
    pip = str(importlib.metadata.distribution("pip").locate_file(""))
    done = start(code.format(home=str(home.folder), wheels=wheels), pip)
    assert done.returncode == 0, done.stderr
    listed = [
        {line.split(",")[0] for line in record.read_text().splitlines()}
        for record in home.folder.glob("*.dist-info/RECORD")
    ]
    assert len(listed) == 2
    assert not listed[0] & listed[1]
    assert ask("cuda", cuda13, home)["name"] == "cu13"
    for entry in next(each for each in listed if any("multigemm_cu12/" in path for path in each)):
        (home.folder / entry).unlink(missing_ok=True)
    assert ask("cuda", cuda13, home)["name"] == "cu13"


def test_the_kit_tests_the_front_that_is_installed(cpu):
    shown = run("import multigemm._dispatch as d; show(file=d.__file__)", cpu)
    assert shown["file"] == str(FRONT / "_dispatch.py")
