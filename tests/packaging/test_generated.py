"""What follows from ci/matrix.toml: a backend that is added there appears by itself wherever it has to."""

import copy
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from loading_kit import ci_script

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ci_script("generate")
WHEELS = ci_script("generate_wheels")
HEADERS = ci_script("headers")
MATRIX = GENERATE.read_matrix()
TEMPLATES = sorted((ROOT / "ci" / "templates").glob("*.yml"))


def with_backend(toolkit):
    """The matrix with one more backend, made of the toolkit of that name."""
    matrix = copy.deepcopy(MATRIX)
    kind = "rocm" if toolkit.startswith("ROCm") else "cuda"
    new = {"name": "new", "distribution": "multigemm-new", "import_name": "multigemm_new", "kind": kind}
    new |= {"folder": "packages/multigemm-new", "toolkit": toolkit, "architectures": ["sm_80", "sm_90a"]}
    matrix["backend"].append(new)
    return matrix, new


def filled(matrix):
    pins = (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8")
    values = WHEELS.values(matrix, pins)
    return {t.stem: WHEELS.workflow(t.read_text(encoding="utf-8"), values, t.name) for t in TEMPLATES}


@pytest.mark.parametrize("toolkit", [name for name in MATRIX["toolkit"] if name])
def test_a_new_backend_appears_by_itself(toolkit):
    matrix, new = with_backend(toolkit)
    table = WHEELS.cibuildwheel_table(matrix, new)
    assert "ci/wheel_test.py new" in table
    assert '"sm_80;sm_90a"' in table
    for pattern in matrix["toolkit"][toolkit]["exclude"]:
        assert f"--exclude '{pattern}'" in table
    texts = filled(matrix)
    assert '{"backend": "new", "folder": "packages/multigemm-new"}' in texts["wheels"]
    assert '"multigemm_new"' in texts["release"]
    assert '{"backend": "new", "runner": ["self-hosted"' in texts["gpu"]
    assert 'new = ["multigemm-new==' in GENERATE.extras(matrix, "0.1.0")


def test_every_value_of_a_template_is_filled_in():
    for name, text in filled(MATRIX).items():
        assert "<<" not in text, name
    with pytest.raises(SystemExit, match="<<nonsense>> has no value"):
        WHEELS.workflow("x: <<nonsense>>\n", {}, "x.yml")


def test_a_toolkit_without_a_table_is_refused():
    matrix, new = with_backend("CUDA 13")
    new["toolkit"] = "CUDA 99"
    with pytest.raises(SystemExit, match=r"CUDA 99.*no table"):
        WHEELS.cibuildwheel_table(matrix, new)


def test_the_table_goes_to_the_end_and_is_replaced_there():
    once = WHEELS.with_table("[project]\n", "[tool.a]\n", "x")
    assert once.startswith("[project]\n\n# generated") and once.endswith("[tool.a]\n# end cibuildwheel\n")
    twice = WHEELS.with_table(once, "[tool.b]\n", "x")
    assert twice == once.replace("[tool.a]", "[tool.b]")
    with pytest.raises(SystemExit, match="expected one line"):
        WHEELS.with_table(f"{once}[tool.c]\n", "[tool.b]\n", "x")


@pytest.mark.parametrize("row", MATRIX["backend"], ids=[row["name"] for row in MATRIX["backend"]])
def test_the_repair_leaves_out_what_the_wheel_needs_of_others(row):
    """Patterns are compared with whole names, version and all: `libcublas.so` would graft libcublas.so.13."""
    cmake = (ROOT / row["folder"] / "CMakeLists.txt").read_text(encoding="utf-8")
    needed = re.findall(r'\\"soname\\": \\"([^"\\]+)\\"', cmake)
    assert needed or row["kind"] == "rocm"
    patterns = WHEELS.excludes(MATRIX, row)
    for soname in [*needed, "libtorch_cpu.so"]:
        soname = soname.replace("${MAJOR}", row["toolkit"].rpartition(" ")[2])
        assert any(fnmatch(soname, pattern) for pattern in patterns), (soname, patterns)


def test_the_build_and_the_jobs_are_among_the_tested_pythons():
    python = MATRIX["python"]
    ids = WHEELS.tested_ids(MATRIX)
    assert ids[0] == f"cp{python['build'].replace('.', '')}-manylinux_x86_64"
    assert {python["jobs"], *python["suite"]} <= set(python["test"])
    assert tuple(map(int, python["build"].split("."))) == tuple(MATRIX["front"]["min_python"])


def test_workflows_give_no_more_rights_than_reading_by_default():
    for name, text in filled(MATRIX).items():
        head = text.partition("jobs:\n")[0]
        assert "permissions:\n  contents: read\n" in head, name
        assert "pull_request_target" not in text, name


def test_values_are_json_so_that_no_name_can_break_a_workflow():
    matrix, new = with_backend("CUDA 13")
    new["name"] = 'a"b: c'
    line = next(x for x in filled(matrix)["gpu"].splitlines() if "include:" in x)
    assert json.loads(line.partition("include: ")[2])[-1]["backend"] == 'a"b: c'


def test_headers_are_told_from_the_rest():
    wanted = ["torch/include/a.h", "cute/b.hpp", "c.cuh", "d.inl", "torch-2.dist-info/LICENSE"]
    assert [n for n in [*wanted, "torch/lib/libtorch.so", "torch/x.py"] if HEADERS.is_header(n)] == wanted
