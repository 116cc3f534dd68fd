"""Which precision a float32 product gets; what a GPU computes with it is tested in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm import _dispatch, _precision
from multigemm.ops import _route

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _flag_afterwards() -> Iterator[None]:
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


def operand(dtype: torch.dtype = torch.float32, device: str = "cuda") -> Any:
    return SimpleNamespace(dtype=dtype, device=torch.device(device))


@pytest.mark.parametrize("flag", ["ieee", "tf32"])
def test_the_flag_counts_where_nothing_was_asked_for(flag: str) -> None:
    MATMUL.fp32_precision = flag
    assert _precision.resolved(operand(), "") == flag
    assert _precision.resolved(operand(), "ieee") == "ieee"
    assert _precision.resolved(operand(), "tf32") == "tf32"


def test_the_old_spellings_count() -> None:
    MATMUL.fp32_precision = "ieee"
    MATMUL.allow_tf32 = True
    assert _precision.resolved(operand(), "") == "tf32"
    MATMUL.allow_tf32 = False
    assert _precision.resolved(operand(), "") == "ieee"


def test_other_dtypes_and_the_cpu_have_no_choice() -> None:
    MATMUL.fp32_precision = "tf32"
    assert _precision.resolved(operand(torch.float64), "") == ""
    assert _precision.resolved(operand(torch.bfloat16), "") == ""
    assert _precision.resolved(operand(device="cpu"), "") == ""


def test_torch_is_told_for_the_time_of_a_product() -> None:
    MATMUL.fp32_precision = "tf32"
    with _precision.held(operand(), "ieee"):
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "tf32"
    with pytest.raises(KeyError), _precision.held(operand(), "ieee"):
        raise KeyError
    assert MATMUL.fp32_precision == "tf32"
    for other in (operand(torch.float64), operand(device="cpu")):
        with _precision.held(other, "ieee"):
            assert MATMUL.fp32_precision == "tf32"


@pytest.mark.parametrize("asked", ["", "ieee", "tf32"])
@pytest.mark.parametrize("flag", ["ieee", "tf32"])
@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_backend_is_told(name: str, flag: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels by the last but one argument; for PyTorch's own products its flag is held."""
    seen: list[tuple[str, str]] = []

    def leaf(*arguments: Any) -> None:
        seen.append((arguments[-2], MATMUL.fp32_precision))

    monkeypatch.setattr(_dispatch, "backend_for", lambda device_type: SimpleNamespace(name="fake"))
    MATMUL.fp32_precision = flag
    _route.implementation("grouped_mm", leaf, torch.device("cuda"), name)(operand(), asked)
    wanted = asked or flag
    assert seen == [(wanted, wanted if name == "torch" else flag)]
    assert MATMUL.fp32_precision == flag
