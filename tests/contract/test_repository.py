"""Guards against: a tree that drifts from its own rules, where nobody notices until it is expensive."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRONT = ROOT / "packages" / "multigemm" / "src" / "multigemm"
CODE = {".py", ".c", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".hip", ".cmake"}
CPP = CODE - {".py", ".cmake"}
TOP = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "ci",
    "docs",
    "noxfile.py",
    "packages",
    "pyproject.toml",
    "shared",
    "tests",
}
BY_PRODUCTS = {"build", "dist", "__pycache__"}
ONE_ARCHITECTURE = re.compile(r"_(sm|gfx)\d+\w*$")


def relative(path):
    return path.relative_to(ROOT).as_posix()


def files(folder=ROOT):
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in BY_PRODUCTS:
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def code_only(text):
    """C++ without comments and string literals."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    return re.sub(pattern, " ", text, flags=re.DOTALL)


def vendor_names(text):
    return re.findall(r"\b(?:cuda|hip)\w*", code_only(text))


def assertions(source):
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def test_top_level_holds_only_what_readers_expect():
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")} - BY_PRODUCTS
    assert names <= TOP, sorted(names - TOP)


def test_files_are_short_enough_to_read():
    kernels = ROOT / "shared" / "kernels"
    long = {}
    for path in files():
        if path.suffix in CODE:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > (600 if kernels in path.parents else 400):
                long[relative(path)] = lines
    assert long == {}


def test_vendors_are_named_in_one_place_only():
    allowed, found = ROOT / "shared" / "vendor", {}
    for path in files(ROOT / "shared"):
        if path.suffix not in CPP or allowed in path.parents or ONE_ARCHITECTURE.search(path.stem):
            continue
        if path.parent.name == "blas" and path.stem.endswith(("_cuda", "_hip")):  # one vendor's BLAS
            continue
        names = vendor_names(path.read_text(encoding="utf-8"))
        if names:
            found[relative(path)] = sorted(set(names))
    assert found == {}


def test_a_vendors_name_is_found_where_it_is_code():
    assert vendor_names('x = cudaMalloc(p); // hipFree\n"cudaFree"') == ["cudaMalloc"]
    assert vendor_names("#include <hip/hip_runtime.h>") == ["hip", "hip_runtime"]
    assert vendor_names('char quote = \'"\'; hipFree(p); const char* s = "cuda\\"Free";') == ["hipFree"]
    assert vendor_names("get_current_cuda_stream(); chip_count();") == []


def test_the_front_asks_for_the_device_through_accelerators_only():
    accelerator, cli = FRONT / "accelerator", FRONT / "cli"
    found = [
        relative(path)
        for path in files(FRONT)
        if path.suffix == ".py" and accelerator not in path.parents and cli not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if ast.unparse(node) == "torch.cuda"
    ]
    assert found == []


def test_the_front_refuses_with_errors_not_assertions():
    found = {
        relative(path): lines
        for path in files(FRONT)
        if path.suffix == ".py" and (lines := assertions(path.read_text(encoding="utf-8")))
    }
    assert found == {}
    assert assertions("def f(x):\n    assert x\n") == [2]


def test_generated_files_are_fresh():
    command = [sys.executable, str(ROOT / "ci" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_are_fresh_and_their_links_lead_somewhere():
    command = [sys.executable, str(ROOT / "ci" / "docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "contract").glob("test_*.py")), ids=lambda p: p.stem
)
def test_a_contract_opens_with_the_failure_it_guards(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert len(text.split()) >= 5, f"{relative(path)}: its docstring has to name the class of failure"


def test_nothing_is_left_unfinished_and_no_machine_is_named():
    words = re.compile(r"\b(TO" r"DO|FIX" r"ME|X{3}|HA" r"CK)\b|raise Not" r"ImplementedError")
    places = re.compile(r"(^|[^\w.-])/(root|home|work|tmp)/\w", re.MULTILINE)
    found = [
        f"{relative(path)}: {match.group().strip()}"
        for path in files()
        if path.suffix in CODE | {".md", ".toml", ".txt"} and "LICENSE" not in path.name
        for pattern in (words, places)
        if (match := pattern.search(path.read_text(encoding="utf-8")))
    ]
    assert found == []
