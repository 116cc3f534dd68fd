"""Bad calls give one clear sentence, the same one under fake tensors and torch.compile; options work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import multigemm
from multigemm import errors


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


SIZES = torch.tensor([1, 2, 3])
mm, wgrad = multigemm.grouped_mm, multigemm.grouped_mm_wgrad

# name -> (call with the operands, operands, error, the sentence)
BAD: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], type[Exception], str]] = {
    "other device": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 4), t(3, 4, 5, device="meta")),
        errors.DeviceError,
        "grouped_mm: w must be on the device of x, cpu, got meta; move it with w.to(x.device).",
    ),
    "other dtype": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 4), t(3, 4, 5, dtype=torch.float64)),
        errors.DTypeError,
        "grouped_mm: w must have the dtype of x, float32, got float64; convert one of them.",
    ),
    "integers": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 4, dtype=torch.int32), t(3, 4, 5, dtype=torch.int32)),
        errors.DTypeError,
        "grouped_mm: x must be float64, float32, float16 or bfloat16, got int32.",
    ),
    "x of one dimension": (
        lambda x, w: mm(x, w, SIZES),
        (t(6), t(3, 4, 5)),
        errors.ShapeError,
        "grouped_mm: x must have shape [N, K] or [N, B, K], got [6].",
    ),
    "w without B": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 2, 4), t(3, 4, 5)),
        errors.ShapeError,
        "grouped_mm: w must have shape [G, B, K, M] or [G, 1, K, M] where x is [N, B, K], "
        "got w [3, 4, 5] and x [6, 2, 4].",
    ),
    "inner sizes": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 4), t(3, 5, 4)),
        errors.ShapeError,
        "grouped_mm: the inner sizes K must agree: x [6, 4] has K = 4, w [3, 5, 4] has K = 5.",
    ),
    "number of groups": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 4), t(2, 4, 5)),
        errors.ShapeError,
        "grouped_mm: w must hold one matrix for each of the 3 entries of group_sizes, got w [2, 4, 5].",
    ),
    "B": (
        lambda x, w: mm(x, w, SIZES),
        (t(6, 2, 4), t(3, 3, 4, 5)),
        errors.ShapeError,
        "grouped_mm: w must have B = 2 as x [6, 2, 4] has, or 1 to share one matrix over B, "
        "got w [3, 3, 4, 5].",
    ),
    "bias": (
        lambda x, w, b: mm(x, w, SIZES, bias=b),
        (t(6, 4), t(3, 4, 5), t(3, 4)),
        errors.ShapeError,
        "grouped_mm: bias must have shape [3, 5], got [3, 4].",
    ),
    "float sizes": (
        lambda x, w, s: mm(x, w, s),
        (t(6, 4), t(3, 4, 5), t(3)),
        errors.DTypeError,
        "grouped_mm: group_sizes must be int32 or int64, got float32.",
    ),
    "sizes of two dimensions": (
        lambda x, w, s: mm(x, w, s),
        (t(6, 4), t(3, 4, 5), t(3, 1, dtype=torch.int64)),
        errors.ShapeError,
        "grouped_mm: group_sizes must have shape [G], got [3, 1].",
    ),
    "float offsets": (
        lambda x, gy, s: wgrad(x, gy, offsets=s),
        (t(6, 4), t(6, 5), t(3)),
        errors.DTypeError,
        "grouped_mm_wgrad: offsets must be int32 or int64, got float32.",
    ),
    "rows": (
        lambda x, gy: wgrad(x, gy, SIZES),
        (t(6, 4), t(5, 4)),
        errors.ShapeError,
        "grouped_mm_wgrad: gy must have shape [6, M] to go with x [6, 4], got [5, 4].",
    ),
    "sum_batch without B": (
        lambda x, gy: wgrad(x, gy, SIZES, sum_batch=True),
        (t(6, 4), t(6, 4)),
        errors.ShapeError,
        "grouped_mm_wgrad: sum_batch needs x [N, B, K], got x with two dimensions.",
    ),
    "out_dtype": (
        lambda x, w: mm(x, w, SIZES, out_dtype=torch.int32),
        (t(6, 4), t(3, 4, 5)),
        errors.DTypeError,
        "grouped_mm: out_dtype must be float64, float32, float16 or bfloat16, got int32.",
    ),
    "precision": (
        lambda x, w: mm(x, w, SIZES, precision="fast"),
        (t(6, 4), t(3, 4, 5)),
        errors.OptionError,
        'grouped_mm: precision must be None, "ieee" or "tf32", got \'fast\'.',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_sentence(name: str) -> None:
    call, operands, error, sentence = BAD[name]
    with pytest.raises(error) as caught:
        call(*operands)
    assert str(caught.value) == sentence
    assert isinstance(caught.value, (ValueError, TypeError))


@pytest.mark.parametrize("name", BAD)
def test_the_same_sentence_under_fake_tensors(name: str) -> None:
    call, operands, error, sentence = BAD[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(o) for o in operands]
        with pytest.raises(error) as caught:
            call(*fakes)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", BAD)
def test_the_same_sentence_under_compile(name: str) -> None:
    call, operands, _, sentence = BAD[name]
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        torch.compile(call, fullgraph=True, backend="eager")(*operands)
    texts, error = "", caught.value
    while error is not None:
        texts += str(error)
        error = error.__cause__ or error.__context__
    assert sentence in texts or sentence.replace('"', '\\"').replace("'", "\\'") in texts


def test_sizes_on_a_wrong_device() -> None:
    """Sizes may be on the CPU or with x, nowhere else. (meta stands in for a second device here.)"""
    with FakeTensorMode() as mode:
        x = torch.empty(6, 4, device="cpu")
        w = torch.empty(3, 4, 5, device="cpu")
        sizes = torch.empty(3, dtype=torch.int64, device="cuda")
        assert mode is not None
        with pytest.raises(errors.DeviceError) as caught:
            mm(x, w, sizes)
    assert (
        str(caught.value)
        == "grouped_mm: group_sizes must be on the device of x, cpu, or on the CPU, got cuda:0."
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "grouped_mm: give exactly one of group_sizes and offsets, got neither."),
        (
            {"group_sizes": SIZES, "offsets": SIZES},
            "grouped_mm: give exactly one of group_sizes and offsets, got both.",
        ),
    ],
)
def test_sizes_or_offsets(given: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(errors.GroupSizesError) as caught:
        mm(t(6, 4), t(3, 4, 5), **given)
    assert str(caught.value) == sentence


def test_not_tensors() -> None:
    with pytest.raises(
        errors.DTypeError, match=r"x must be a torch.Tensor \[N, K\] or \[N, B, K\], got list"
    ):
        mm([[1.0]], t(3, 4, 5), SIZES)
    with pytest.raises(errors.DTypeError, match="must be a 1-D int32 or int64 tensor or a list of integers"):
        mm(t(6, 4), t(3, 4, 5), [1.0, 2.0, 3.0])


def test_a_list_of_sizes(device: torch.device) -> None:
    x, w = torch.randn(6, 4, device=device), torch.randn(3, 4, 5, device=device)
    tensor = mm(x, w, SIZES.to(device))
    torch.testing.assert_close(mm(x, w, [1, 2, 3]), tensor)
    torch.testing.assert_close(mm(x, w, offsets=[1, 3, 6]), tensor)
    torch.testing.assert_close(mm(x, w, SIZES.to(torch.int32)), tensor)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_out(layout: str, dtype: torch.dtype, pinned: str, device: torch.device) -> None:
    x, w = torch.randn(8, 4, device=device), torch.randn(3, 4, 5, device=device)
    out = {
        "contiguous": lambda: torch.full((8, 5), float("nan"), device=device, dtype=dtype),
        "transposed": lambda: torch.full((5, 8), float("nan"), device=device, dtype=dtype).mT,
        "sliced": lambda: torch.full((16, 11), float("nan"), device=device, dtype=dtype)[::2, 1::2],
    }[layout]()
    result = mm(x, w, SIZES.to(device), out=out)
    assert result is out
    torch.testing.assert_close(out, mm(x, w, SIZES.to(device), out_dtype=dtype))
    dw = torch.full((3, 4, 5), float("nan"), device=device)
    assert wgrad(x, result.float(), SIZES.to(device), out=dw) is dw
    torch.testing.assert_close(dw, wgrad(x, result.float(), SIZES.to(device)))


def test_out_refused() -> None:
    x, w = t(6, 4), t(3, 4, 5)
    storage = t(100)
    for out, error, text in (
        (t(6, 4), errors.ShapeError, r"out must have shape \[6, 5\], got \[6, 4\]"),
        (t(6, 1).expand(6, 5), errors.ShapeError, "must not be an expanded tensor"),
        (t(6, 5, dtype=torch.int64), errors.DTypeError, "out must be float64"),
        (t(6, 5, device="meta"), errors.DeviceError, "out must be on the device of x"),
    ):
        with pytest.raises(error, match=text):
            mm(x, w, SIZES, out=out)
    with pytest.raises(errors.ShapeError, match="must not share memory with an operand"):
        mm(storage[:24].view(6, 4), w, SIZES, out=storage[20:50].view(6, 5))
    disjoint = storage[24:54].view(6, 5)
    assert mm(storage[:24].view(6, 4), w, SIZES, out=disjoint) is disjoint
    with pytest.raises(errors.OptionError, match=r"out has dtype torch\.float32 but out_dtype"):
        mm(x, w, SIZES, out=t(6, 5), out_dtype=torch.float64)
    with pytest.raises(errors.OptionError, match="out= is not differentiable"):
        mm(x.requires_grad_(), w, SIZES, out=t(6, 5))
    with torch.no_grad():
        mm(x, w, SIZES, out=t(6, 5))


def test_out_under_compile(device: torch.device) -> None:
    x, w = torch.randn(6, 4, device=device), torch.randn(3, 4, 5, device=device)
    sizes = SIZES.to(device)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty(6, 5, device=x.device)
        mm(x, w, sizes, out=out)
        return out + 1

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x, w), f(x, w))


@pytest.mark.parametrize("precision", ["ieee", "tf32", None])
def test_precision_is_full_on_the_cpu(precision: str | None, pinned: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("about the CPU; tests/gpu/test_agreement.py has the GPU's")
    x, w = torch.randn(6, 64), torch.randn(3, 64, 5)
    y = mm(x, w, SIZES, precision=precision)
    torch.testing.assert_close(y.double(), mm(x.double(), w.double(), SIZES), atol=1e-5, rtol=1e-5)


def test_errors_are_of_three_kinds() -> None:
    assert issubclass(errors.BackendError, ImportError)
    assert issubclass(errors.NativeError, RuntimeError)
    for bad in (errors.ShapeError, errors.DeviceError, errors.GroupSizesError, errors.OptionError):
        assert issubclass(bad, ValueError)
    assert issubclass(errors.DTypeError, TypeError)
