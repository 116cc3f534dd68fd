"""ci/matrix.toml tells users what a backend is: the installed wheels have to say the same."""

from pathlib import Path

import pytest
from loading_kit import ci_script

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ci_script("generate")
BACKENDS, VERSION = GENERATE.read_matrix()["backend"], GENERATE.read_version()
QUICK = [row for row in BACKENDS if "quick" in row]


@pytest.mark.parametrize("row", BACKENDS, ids=[row["name"] for row in BACKENDS])
def test_the_wheel_is_what_the_matrix_says(row):
    wheel = pytest.importorskip(row["import_name"], reason=f"{row['distribution']} is not installed")
    told = wheel.describe()
    assert told["version"] == VERSION
    assert {key: told[key] for key in ("name", "kind", "min_torch")} == {
        key: row[key] for key in ("name", "kind", "min_torch")
    }
    # A GPU wheel may be the quick build, which CI tests.
    assert told["architectures"] in (row["architectures"], row.get("quick"))
    assert Path(told["folder"]).parent != ROOT / Path(row["folder"]) / "src", "not the installed wheel"


@pytest.mark.parametrize("row", QUICK, ids=[row["name"] for row in QUICK])
def test_a_quick_build_is_the_default_and_a_part_of_the_published_one(row):
    assert set(row["quick"]) < set(row["architectures"])
    text = (ROOT / row["folder"] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'default = "{";".join(row["quick"])}"' in text


def test_a_backend_is_listed_when_it_exists_and_only_then():
    folders = {f"packages/{p.name}" for p in (ROOT / "packages").iterdir() if (p / "pyproject.toml").exists()}
    assert folders == {row["folder"] for row in BACKENDS} | {"packages/multigemm"}
