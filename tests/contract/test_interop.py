"""Arrays of other libraries through the C ABI: the same values and errors, and no PyTorch unless needed.

The failure: a foreign array read with byte strides taken for elements, on the wrong device or stream, or
an import that fails because a framework is missing that the call does not need. NumPy stands in for the
device libraries here; CuPy is tested on a GPU (tests/gpu/test_cupy.py).
https://github.com/pytorch/pytorch/pull/24947 https://github.com/NVIDIA/cuda-python/issues/1396
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

import multigemm
from multigemm import _dispatch, _opening, _selection, errors, interop

np = pytest.importorskip("numpy", reason="NumPy is not installed")
mm, wgrad = interop.grouped_mm, interop.grouped_mm_wgrad

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}
NAMES = (None, "native", "blas", "simt")
SIZES = [4, 0, 11, 9, 6]


@pytest.fixture(scope="module")
def backend() -> None:
    pytest.importorskip("multigemm_cpu", reason="multigemm-cpu is not installed")


def normal(*shape: int, dtype: str = "float64") -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def close(actual: Any, expected: torch.Tensor, dtype: str, terms: int) -> None:
    oracle.assert_close(tensor(actual), expected, DTYPES[dtype], terms, 16.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["rows", "batch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(backend: None, dtype: str, batch: tuple[int, ...], name: str | None) -> None:
    x, w = normal(33, *batch, 5, dtype=dtype), normal(5, *batch, 5, 7, dtype=dtype)
    gy, bias = normal(33, *batch, 7, dtype=dtype), normal(5, *batch, 7, dtype=dtype)
    y = mm(x, w, SIZES, bias=bias, implementation=name)
    assert isinstance(y, np.ndarray) and y.dtype == x.dtype
    close(y, oracle.grouped_mm(tensor(x), tensor(w), SIZES, False, tensor(bias)), dtype, 5)
    assert not y[sum(SIZES) :].any()
    dw = wgrad(x, gy, np.array(SIZES, dtype="int32"), implementation=name)
    close(dw, oracle.grouped_mm_wgrad(tensor(x), tensor(gy), SIZES), dtype, 11)
    if batch:
        shared = wgrad(x, gy, SIZES, sum_batch=True, implementation=name)
        close(shared, oracle.grouped_mm_wgrad(tensor(x), tensor(gy), SIZES, False, True), dtype, 33)


LAYOUTS = {
    "transposed": lambda a: np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    "sliced": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "expanded": lambda a: np.broadcast_to(a[:1], a.shape),
    "unaligned": lambda a: np.frombuffer(b"." + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
    "a field of records": lambda a: _field(a),
}


def _field(a: Any) -> Any:
    """A view whose strides in bytes are no whole number of elements."""
    records = np.zeros(a.shape, dtype=[("value", a.dtype), ("mark", np.uint8)])
    records["value"] = a
    return records["value"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(backend: None, layout: str) -> None:
    x, w, gy = (LAYOUTS[layout](normal(*shape)) for shape in ((33, 5), (5, 5, 7), (33, 7)))
    assert np.array_equal(mm(x, w, SIZES), mm(x.copy(order="C"), w.copy(order="C"), SIZES))
    same = wgrad(x.copy(order="C"), gy.copy(order="C"), SIZES)
    np.testing.assert_allclose(wgrad(x, gy, SIZES), same, atol=1e-13)


def test_out_and_out_dtype(backend: None) -> None:
    x, w = normal(33, 5), normal(5, 5, 7)
    y = mm(x, w, SIZES)
    out = np.full((66, 14), np.nan)
    assert mm(x, w, offsets=np.cumsum(SIZES), out=out[::2, ::2])[0, 0] == out[0, 0]
    assert np.array_equal(out[::2, ::2], y)
    assert np.isnan(out[1::2]).all() and np.isnan(out[:, 1::2]).all()
    assert mm(x, w, SIZES, out_dtype="float32").dtype == np.float32
    assert mm(x, w, SIZES, out_dtype=np.float32).dtype == np.float32


def test_arrays_that_speak_dlpack(backend: None) -> None:
    x, w, sizes = tensor(normal(33, 5)), tensor(normal(5, 5, 7)), torch.tensor(SIZES)
    out = torch.full((33, 7), float("nan"), dtype=torch.float64)
    assert mm(x, w, sizes, out=out) is out
    torch.testing.assert_close(out, multigemm.grouped_mm(x, w, sizes))
    with pytest.raises(
        errors.DTypeError, match=r"grouped_mm: x, a torch\.Tensor, cannot be read as an array"
    ):
        mm(x.requires_grad_(), w, sizes)


def test_sizes_are_data(backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(5, 4), normal(2, 4, 3)
    assert np.array_equal(mm(x, w, [3, 9]), mm(x, w, [3, 2]))
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    with pytest.raises(errors.GroupSizesError, match=r"got 12 rows up to and with group_sizes\[1\] = 9"):
        mm(x, w, [3, 9])
    with pytest.raises(errors.GroupSizesError, match=r"offsets must not fall, got offsets\[1\] = 2 after 3"):
        wgrad(x, x, offsets=np.array([3, 2]))


X, W = np.ones((6, 4)), np.ones((3, 4, 5))
BAD = [
    (
        lambda: mm([[1.0]], W, [1, 2, 3]),
        errors.DTypeError,
        r"x must be an array \[N, K\] or \[N, B, K\] of CuPy",
    ),
    (
        lambda: mm(X[0], W, [1, 2, 3]),
        errors.ShapeError,
        r"x must have shape \[N, K\] or \[N, B, K\], got \[4\]",
    ),
    (lambda: mm(X, W[0], [1, 2, 3]), errors.ShapeError, r"w must have shape \[G, K, M\], or"),
    (lambda: mm(X, W[:, :3], [1, 2, 3]), errors.ShapeError, "the inner sizes K must agree"),
    (lambda: mm(X, W, [1, 2]), errors.ShapeError, "w must hold one matrix for each of the 2 entries"),
    (lambda: mm(X, W.astype("float32"), [1, 2, 3]), errors.DTypeError, "w must have the dtype of x, float64"),
    (
        lambda: mm(X.astype(">f8"), W.astype(">f8"), [1, 2, 3]),
        errors.DTypeError,
        "x must be float64.*got >f8",
    ),
    (lambda: mm(X, W, [1.0, 2.0, 3.0]), errors.DTypeError, "group_sizes must be an array of int32 or int64"),
    (lambda: mm(X, W, np.ones(3)), errors.DTypeError, "group_sizes must be int32 or int64, got float64"),
    (lambda: mm(X, W, np.ones((3, 1), int)), errors.ShapeError, r"group_sizes must have shape \[G\], got"),
    (lambda: mm(X, W), errors.GroupSizesError, "give exactly one of group_sizes and offsets, got neither"),
    (lambda: mm(X, W, [1, 2, 3], bias=X), errors.ShapeError, r"bias must have shape \[3, 5\], got \[6, 4\]"),
    (lambda: mm(X, W, [1, 2, 3], out=X), errors.ShapeError, r"out must have shape \[6, 5\], got \[6, 4\]"),
    (lambda: mm(X, W, [1, 2, 3], out_dtype="int8"), errors.DTypeError, "out_dtype must be float64"),
    (
        lambda: mm(X, W, [1, 2, 3], out_dtype="fast"),
        errors.DTypeError,
        "out_dtype must be float64.*got 'fast'",
    ),
    (lambda: mm(X, W, [1, 2, 3], precision="fast"), errors.OptionError, "precision must be None"),
    (
        lambda: mm(X, W, [1, 2, 3], implementation="torch"),
        errors.OptionError,
        "there are: native, blas, simt",
    ),
    (lambda: wgrad(X, X[:5], [1, 2, 3]), errors.ShapeError, r"gy must have shape \[6, M\] to go with x"),
    (lambda: wgrad(X, X, [6], sum_batch=True), errors.ShapeError, "sum_batch needs x"),
    (
        lambda: wgrad(X, X, [6], out=np.ones((1, 4, 8))[..., ::-2]),
        errors.ShapeError,
        "whole elements for strides",
    ),
    (lambda: mm(X, W, [1, 2, 3], out=np.ones((6, 5), int)), errors.DTypeError, "out must be float64"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_a_bad_call_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_outputs_that_cannot_be_written() -> None:
    room = np.zeros(100)
    x, w = room[:24].reshape(6, 4), np.ones((3, 4, 5))
    with pytest.raises(errors.ShapeError, match="must not share memory with an operand"):
        mm(x, w, [1, 2, 3], out=room[20:50].reshape(6, 5))
    with pytest.raises(errors.ShapeError, match="must not be an expanded array"):
        mm(x, w, [1, 2, 3], out=np.lib.stride_tricks.as_strided(np.zeros(5), (6, 5), (0, 8)))
    fixed = np.zeros((6, 5))
    fixed.flags.writeable = False
    with pytest.raises(errors.OptionError, match="out is read-only"):
        mm(x, w, [1, 2, 3], out=fixed)


def test_a_device_array_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        __cuda_array_interface__ = {"shape": (1, 1), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(errors.BackendError, match="device arrays need CuPy"):
        mm(Foreign(), Foreign(), [1])


# --- the choice of a backend, and PyTorch that is not there -----------------------------------------


def candidate(name: str, major: int | None, folder: str = "/nowhere", **info: Any) -> _selection.Candidate:
    kind = "cpu" if major is None else "cuda"
    described = {"protocol": 1, "abi": 1, "kind": kind, "major": major, "min_torch": [99], "needed": []}
    described |= {"optional_symbols": [], "min_blas": None, "version": "1.0", **info}
    return _selection.Candidate(name, f"multigemm-{name}", "1.0", folder, described)


@pytest.mark.parametrize(("version", "chosen"), [((12, 9), "cu12"), ((13, 0), "cu13"), ((11, 8), None)])
def test_the_backend_of_cupys_cuda_major(version: tuple[int, ...], chosen: str | None) -> None:
    """PyTorch's own version and flavour do not count: it may be another, or none."""
    host = _selection.Torch("14.0", (14, 0), _selection.Flavour("cuda", version), "CuPy")
    installed = [candidate("cpu", None), candidate("cu12", 12), candidate("cu13", 13)]
    decision = _selection.select("cuda", host, installed, _selection.Front("1.0"))
    assert (decision.chosen.name if decision.chosen else None) == chosen
    if chosen is None:
        assert decision.failure is not None and "this CuPy is built for CUDA 11.8" in decision.failure.cause


def test_two_that_fit_are_ambiguous() -> None:
    host = _selection.Torch("14.0", (14, 0), _selection.Flavour("cuda", (13, 0)), "CuPy")
    installed = [candidate("cu13", 13), candidate("mine", 13)]
    decision = _selection.select("cuda", host, installed, _selection.Front("1.0"))
    assert decision.chosen is None and decision.failure is not None
    assert decision.failure.error is errors.Ambiguous


def test_no_backend_is_an_error_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no reference to fall back to, whatever the environment allows for tensors."""
    monkeypatch.setenv("MULTIGEMM_BACKEND", "none")
    monkeypatch.setenv("MULTIGEMM_FALLBACK", "torch")
    _dispatch.forget()
    try:
        with pytest.raises(errors.NotInstalled, match="no usable backend for 'cpu' arrays"):
            mm(np.ones((2, 2)), np.ones((1, 2, 2)), [2])
    finally:
        _dispatch.forget()


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
import multigemm, multigemm.interop, numpy
assert multigemm.errors.ShapeError and multigemm.use
found = {}
for name, call in {
    "lazy": lambda: multigemm.grouped_mm,
    "call": lambda: multigemm.interop.grouped_mm(numpy.ones((2, 2)), numpy.ones((1, 2, 2)), [2]),
    "shape": lambda: multigemm.interop.grouped_mm(numpy.ones((2, 2)), numpy.ones((1, 3, 2)), [2]),
}.items():
    try:
        call()
    except Exception as error:
        found[name] = [type(error).__name__, isinstance(error, ImportError), str(error)]
print(json.dumps(found))
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_pytorch(backend: None) -> None:
    found = json.loads(python(WITHOUT_TORCH))
    assert found["lazy"][:2] == ["ImportError", True]
    assert "multigemm.grouped_mm needs PyTorch, which is not installed" in found["lazy"][2]
    assert found["shape"][:2] == ["ShapeError", False]
    info = pytest.importorskip("multigemm_cpu").describe()
    if "core" in info:
        assert "call" not in found
    else:
        assert found["call"][1]
        assert "backend cpu needs PyTorch installed" in found["call"][2]


CORE = """
const char *mg_query_cpu(void) { return "{\\"abi\\": 1, \\"version\\": \\"1.0\\"}"; }
const char *mg_last_error_cpu(void) { return "MG_INTERNAL: none"; }
int mg_abi_sizes_cpu(void) { return 0; }
int mg_grouped_mm_cpu(void) { return 0; }
int mg_grouped_mm_explain_cpu(void) { return 0; }
int mg_grouped_mm_wgrad_cpu(void) { return 0; }
int mg_grouped_mm_wgrad_explain_cpu(void) { return 0; }
"""


def test_a_core_is_opened_without_pytorch(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "core.c").write_text(CORE)
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "core.so"), str(tmp_path / "core.c")]
    subprocess.run(command, check=True)
    info = {"core": "core.so", "library": "binding.so", "kind": "cpu", "needed": [], "optional_symbols": []}
    code = f"""
    import sys
    sys.modules["torch"] = None
    from multigemm import _opening, _selection
    info = {{**{info!r}, "min_blas": None, "version": "1.0"}}
    candidate = _selection.Candidate("cpu", "multigemm-cpu", "1.0", {str(tmp_path)!r}, info)
    backend = _opening.open_core(candidate, _selection.Front("1.0"), [])
    print(backend.library)
    """
    assert python(textwrap.dedent(code)).strip() == str(tmp_path / "core.so")
    wrong = candidate("cpu", None, str(tmp_path), core="absent.so", library="binding.so")
    with pytest.raises(_opening.OpeningError) as caught:
        _opening.open_core(wrong, _selection.Front("1.0"), [])
    assert caught.value.failure.error is errors.LibraryMissing
