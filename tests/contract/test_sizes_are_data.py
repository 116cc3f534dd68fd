"""Group sizes that do not fit: never a read or write out of bounds, and an error where one is asked for.

The failure: offsets passed where sizes are expected, or a sum over the rows, read memory that is not
theirs. https://github.com/pytorch/FBGEMM/issues/4283 https://github.com/vllm-project/vllm/issues/39211
"""

from __future__ import annotations

import oracle
import pytest
import torch

import multigemm
from multigemm import errors

SIZES = [
    [3, 9],
    [9, 3],
    [-2, 4],
    [4, -2],
    [-5, -1],
    [2**62, 2**62],
    [-(2**63), 3],
    [2**63 - 1, 2**63 - 1],
    [3, 2**63 - 1],
]


@pytest.mark.parametrize("offsets", [False, True], ids=["sizes", "offsets"])
@pytest.mark.parametrize("groups", SIZES, ids=str)
def test_clamped(groups: list[int], offsets: bool, pinned: str, device: torch.device) -> None:
    guard = torch.full((12, 4), float("nan"), device=device)
    guard[2:7] = torch.randn(5, 4, device=device)
    x = guard[2:7]  # NaN before and after: reading past the rows would show
    w = torch.randn(2, 4, 3, device=device)
    value = torch.tensor(groups, device=device)
    keyword = {"offsets": value} if offsets else {"group_sizes": value}
    out = torch.full((12, 3), 7.0, device=device)
    multigemm.grouped_mm(x, w, **keyword, out=out[2:7])
    oracle.assert_close(out[2:7], oracle.grouped_mm(x, w, groups, offsets), torch.float32, 4, 8.0)
    assert bool((out[:2] == 7).all()) and bool((out[7:] == 7).all())
    dw = multigemm.grouped_mm_wgrad(x, x, **keyword)
    oracle.assert_close(dw, oracle.grouped_mm_wgrad(x, x, groups, offsets), torch.float32, 5, 8.0)


@pytest.mark.parametrize("offsets", [False, True], ids=["sizes", "offsets"])
@pytest.mark.parametrize("groups", [[-3, 4], [2**31 - 1, 2**31 - 1], [-(2**31), 2]], ids=str)
def test_clamped_int32(groups: list[int], offsets: bool, pinned: str, device: torch.device) -> None:
    x, w = torch.randn(5, 4, device=device), torch.randn(2, 4, 3, device=device)
    value = torch.tensor(groups, dtype=torch.int32, device=device)
    y = multigemm.grouped_mm(x, w, **({"offsets": value} if offsets else {"group_sizes": value}))
    oracle.assert_close(y, oracle.grouped_mm(x, w, groups, offsets), torch.float32, 4, 8.0)


REFUSED = [
    ({"group_sizes": [2, -1, 1]}, "group_sizes must not be negative, got group_sizes[1] = -1."),
    (
        {"group_sizes": [2, 9, 1]},
        "the groups must fit into the N = 5 rows of x, got 11 rows up to and with group_sizes[1] = 9.",
    ),
    ({"offsets": [3, 2, 4]}, "offsets must not fall, got offsets[1] = 2 after 3."),
    (
        {"offsets": [3, 4, 6]},
        "the groups must fit into the N = 5 rows of x, got 6 rows up to and with offsets[2] = 6.",
    ),
]


@pytest.mark.parametrize(("groups", "sentence"), REFUSED, ids=str)
def test_refused_where_checks_are_on(groups, sentence, pinned: str, device, monkeypatch) -> None:
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    keyword = {name: torch.tensor(value, device=device) for name, value in groups.items()}
    x, w = torch.randn(5, 4, device=device), torch.randn(3, 4, 3, device=device)
    with pytest.raises(errors.GroupSizesError) as caught:
        multigemm.grouped_mm(x, w, **keyword)
    assert str(caught.value) == f"grouped_mm: {sentence}"
    with pytest.raises(errors.GroupSizesError) as caught:
        multigemm.grouped_mm_wgrad(x, x, **keyword)
    assert str(caught.value) == f"grouped_mm_wgrad: {sentence}"
    with pytest.raises(errors.GroupSizesError):
        multigemm.grouped_mm(x, w, **keyword, out=torch.empty(5, 3, device=device))
    multigemm.grouped_mm(x, w, torch.tensor([2, 0, 1], device=device))
    monkeypatch.setenv("MULTIGEMM_CHECK", "0")
    multigemm.grouped_mm(x, w, **keyword)


def test_checks_hold_in_a_compiled_call(device, monkeypatch) -> None:
    monkeypatch.setenv("MULTIGEMM_CHECK", "1")
    torch._dynamo.reset()
    compiled = torch.compile(multigemm.grouped_mm, fullgraph=True, backend="aot_eager")
    x, w = torch.randn(5, 4, device=device), torch.randn(3, 4, 3, device=device)
    compiled(x, w, torch.tensor([2, 0, 1], device=device))
    with pytest.raises(errors.GroupSizesError):
        compiled(x, w, torch.tensor([2, 9, 1], device=device))
