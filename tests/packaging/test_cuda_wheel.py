"""The real CUDA wheels without a GPU, beside a PyTorch for the CPU: what diagnosis needs of them.

Public reports behind the cases: a missing driver (https://github.com/NVIDIA/cudf/issues/14385),
a toolkit on LD_LIBRARY_PATH (https://github.com/pytorch/pytorch/issues/91067), a backend for another PyTorch
(https://github.com/NVIDIA/cuEquivariance/issues/193), libraries that an installation lacked
(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1905).
"""

from pathlib import Path

import pytest
import torch
from loading_kit import Wheel, run_here, vendor_libraries

FOLDERS = {"cu12": "/nvidia/cublas/lib/", "cu13": "/nvidia/cu13/lib/"}
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")


@pytest.fixture(params=FOLDERS)
def wheel(request):
    found = Wheel(request.param)
    if not found.installed:
        pytest.skip(f"multigemm-{found.name} is not installed")
    return found


def test_it_is_refused_before_it_is_opened(wheel):
    code = f"""
from multigemm import _dispatch, errors
try:
    _dispatch.backend_for("cuda")
except errors.FlavourMismatch as error:
    text = str(error)
show(text=text, mapped=[p for p in mapped() if "multigemm_{wheel.name}" in p or "/libcu" in p])
"""
    shown = run_here(code)
    assert "has no GPU support" in shown["text"]
    assert shown["mapped"] == []


def test_the_library_answers_without_a_gpu_or_a_driver(wheel):
    code = "show(query=query, mapped=[p for p in mapped() if '/libcu' in p], torch='torch' in sys.modules)"
    shown = run_here(wheel.open + code)
    assert not shown["torch"]
    query, info = shown["query"], wheel.info
    assert (query["name"], query["kind"], query["version"]) == (wheel.name, "cuda", info["version"])
    assert query["abi"] == info["abi"] and query["protocol"] == info["protocol"]
    # A number, as backend.json has it: the front compares the two.
    assert isinstance(query["blas_version"], int) and query["blas_version"] >= info["min_blas"]
    assert query["blas_version"] // 10000 == info["major"]
    names = {Path(path).name.split(".so")[0] for path in shown["mapped"]}
    assert names == {"libcublas", "libcublasLt"}
    assert all(FOLDERS[wheel.name] in path for path in shown["mapped"])


def test_another_toolkit_on_the_search_path_loses(wheel, tmp_path):
    """Fakes without a function: the library would not even open with them."""
    vendor_libraries(tmp_path, wheel.info["major"], "foreign")
    shown = run_here(
        wheel.open + "show(mapped=[p for p in mapped() if '/libcublas' in p])", LD_LIBRARY_PATH=str(tmp_path)
    )
    assert len(shown["mapped"]) == 2
    assert not any(str(tmp_path) in path for path in shown["mapped"])


def test_a_call_without_a_gpu_fails_with_a_status(wheel):
    code = f"""{wheel.open}
import torch
from multigemm import _abi
library = _abi.Library(handle, {wheel.name!r})
x, w, y = torch.ones(3, 2), torch.ones(1, 2, 4), torch.empty(3, 4)
problem = _abi.grouped_mm_problem(x, w, torch.tensor([3]), False, None, y)
show(status=library.call(problem), text=library.last_error())
"""
    shown = run_here(code)
    assert shown["status"] != 0
    assert shown["text"].startswith("MG_"), shown
