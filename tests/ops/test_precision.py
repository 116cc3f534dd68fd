"""Which precision a float32 product gets; what a GPU computes with it is tested in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm import _precision

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
