"""The real CUDA 13 wheel without a GPU, beside a PyTorch for the CPU: what diagnosis needs of it.

Public reports behind the cases: a missing driver (https://github.com/NVIDIA/cudf/issues/14385),
a toolkit on LD_LIBRARY_PATH (https://github.com/pytorch/pytorch/issues/91067), a backend for another PyTorch
(https://github.com/NVIDIA/cuEquivariance/issues/193), libraries that an installation lacked
(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1905).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loading_kit import PRELUDE, vendor_libraries

SPEC = importlib.util.find_spec("multigemm_cu13")
pytestmark = [
    pytest.mark.skipif(SPEC is None, reason="multigemm-cu13 is not installed"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA"),
]
FOLDER = Path(SPEC.origin).parent if SPEC is not None else Path()
INFO = json.loads((FOLDER / "backend.json").read_text()) if SPEC is not None else {}
CORE, BINDING = (str(FOLDER / INFO.get(part, "")) for part in ("core", "library"))
OPEN = f"""
import ctypes
handle = ctypes.CDLL({CORE!r})
handle.mg_query_cu13.restype = ctypes.c_char_p
query = json.loads(handle.mg_query_cu13())
"""


def run(code, **env):
    """Run code in a fresh process of this environment; returns what it showed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MULTIGEMM_", "LD_"))}
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, env=kept | env, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_doctor_refuses_it_and_the_cpu_goes_on():
    done = subprocess.run(
        [sys.executable, "-m", "multigemm", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    [entry] = [entry for entry in report["backends"] if entry["backend"] == "cu13"]
    assert (entry["verdict"], entry["opened"]) == ("refused", False)
    assert "has no GPU support" in entry["reason"]
    assert report["healthy"] and done.returncode == 0


def test_it_is_refused_before_it_is_opened():
    code = """
from multigemm import _dispatch, errors
try:
    _dispatch.backend_for("cuda")
except errors.FlavourMismatch as error:
    text = str(error)
show(text=text, mapped=[path for path in mapped() if "cu13" in path or "libcu" in path])
"""
    shown = run(code)
    assert "has no GPU support" in shown["text"]
    assert shown["mapped"] == []


def test_the_library_answers_without_a_gpu_or_a_driver():
    code = "show(query=query, mapped=[p for p in mapped() if '/libcu' in p], torch='torch' in sys.modules)"
    shown = run(OPEN + code)
    assert not shown["torch"]
    query = shown["query"]
    assert (query["name"], query["kind"], query["version"]) == ("cu13", "cuda", INFO["version"])
    assert query["abi"] == INFO["abi"] and query["protocol"] == INFO["protocol"]
    # A number, as backend.json has it: the front compares the two.
    assert isinstance(query["blas_version"], int) and query["blas_version"] >= INFO["min_blas"]
    names = {Path(path).name.split(".so")[0] for path in shown["mapped"]}
    assert names == {"libcublas", "libcublasLt"}
    assert all("/nvidia/cu13/lib/" in path for path in shown["mapped"])


def test_another_toolkit_on_the_search_path_loses(tmp_path):
    """Fakes without a function: the library would not even open with them."""
    vendor_libraries(tmp_path, 13, "foreign")
    shown = run(
        OPEN + "show(mapped=[p for p in mapped() if '/libcublas' in p])", LD_LIBRARY_PATH=str(tmp_path)
    )
    assert len(shown["mapped"]) == 2
    assert not any(str(tmp_path) in path for path in shown["mapped"])


def test_its_structs_are_the_fronts():
    code = f"""{OPEN}
from multigemm import _abi
shown = _abi.Library(handle, "cu13").struct_sizes()
show(theirs=shown, ours=[ctypes.sizeof(struct) for struct in _abi.STRUCTS])
"""
    shown = run(code)
    assert shown["theirs"] == shown["ours"]


def test_a_call_without_a_gpu_fails_with_a_status():
    code = f"""{OPEN}
import torch
from multigemm import _abi
library = _abi.Library(handle, "cu13")
x, w, y = torch.ones(3, 2), torch.ones(1, 2, 4), torch.empty(3, 4)
problem = _abi.grouped_mm_problem(x, w, torch.tensor([3]), False, None, y)
show(status=library.call(problem), text=library.last_error())
"""
    shown = run(code)
    assert shown["status"] != 0
    assert shown["text"].startswith("MG_"), shown


def test_beside_a_pytorch_for_the_cpu_its_registration_does_no_harm():
    code = f"""
import torch, multigemm
torch.ops.load_library({BINDING!r})
x, w = torch.ones(3, 2), torch.ones(2, 2, 4)
show(y=multigemm.grouped_mm(x, w, torch.tensor([1, 2])).unique().tolist())
"""
    assert run(code)["y"] == [2.0]
