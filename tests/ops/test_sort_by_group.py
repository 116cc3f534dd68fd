"""Labels to row blocks and back."""

from __future__ import annotations

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

import multigemm
from multigemm import _dispatch, errors


@settings(deadline=None)
@given(
    st.lists(st.integers(-2, 8), max_size=40),
    st.integers(0, 7),
    st.sampled_from([torch.int32, torch.int64, torch.uint8]),
)
def test_order(values: list[int], groups: int, dtype: torch.dtype) -> None:
    if dtype == torch.uint8:
        values = [max(v, 0) for v in values]
    labels = torch.tensor(values, dtype=dtype)
    order = multigemm.sort_by_group(labels, groups)
    ordered = labels[order.permutation].tolist()
    inside = [v for v in values if 0 <= v < groups]
    assert order.group_sizes.tolist() == [values.count(g) for g in range(groups)]
    assert ordered[: len(inside)] == sorted(inside)
    assert torch.equal(labels[order.permutation][order.inverse], labels)
    for g in range(groups):  # stable: rows of a group keep their order
        places = [int(n) for n in order.permutation if values[int(n)] == g]
        assert places == sorted(places)


def test_rows_without_a_group_give_zeros(device: torch.device) -> None:
    labels = torch.tensor([1, -1, 0, 5, 1], device=device)
    x = torch.randn(5, 3, device=device)
    w = torch.randn(2, 3, 4, device=device)
    order = multigemm.sort_by_group(labels, 2)
    y = multigemm.grouped_mm(x[order.permutation], w, order.group_sizes)[order.inverse]
    assert torch.equal(y[[1, 3]], torch.zeros(2, 4, device=device))
    torch.testing.assert_close(y[[0, 2, 4]], torch.stack([x[0] @ w[1], x[2] @ w[0], x[4] @ w[1]]))


def test_nothing_is_read_back(device: torch.device) -> None:
    """No operator whose result depends on values reaching the host: none of them runs."""

    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
            assert "bincount" not in str(func), func
            return func(*args, **(kwargs or {}))

    with NoSync():
        multigemm.sort_by_group(torch.tensor([1, 0, 1], device=device), 3)


def test_compiles(device: torch.device) -> None:
    labels = torch.randint(-1, 5, (50,), device=device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda v: tuple(multigemm.sort_by_group(v, 4)), fullgraph=True, backend="aot_eager"
    )
    for ours, theirs in zip(compiled(labels), multigemm.sort_by_group(labels, 4), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("labels", "groups", "error", "sentence"),
    [
        (torch.zeros(3), 2, errors.DTypeError, "labels must be an integer tensor [N], got torch.float32."),
        (
            torch.zeros(3).bool(),
            2,
            errors.DTypeError,
            "labels must be an integer tensor [N], got torch.bool.",
        ),
        ([1, 2], 2, errors.DTypeError, "labels must be an integer tensor [N], got list."),
        (torch.zeros(3, 1).long(), 2, errors.ShapeError, "labels must have shape [N], got [3, 1]."),
        (torch.zeros(3).long(), -1, errors.OptionError, "num_groups must not be negative, got -1."),
    ],
)
def test_refused(labels, groups, error, sentence) -> None:
    with pytest.raises(error) as caught:
        multigemm.sort_by_group(labels, groups)
    assert str(caught.value) == f"sort_by_group: {sentence}"


@pytest.mark.parametrize("groups", [1, 7, 1024])
@pytest.mark.parametrize("rows", [0, 5, 3000])
def test_the_order_by_a_kernel(
    rows: int, groups: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What layers take on a GPU: the same rows in the same places."""
    if _dispatch.backend_for(device.type) is None:
        pytest.skip("no backend")
    labels = torch.randint(-2, groups + 2, (2 * rows,))[::2].to(device)  # not contiguous
    if rows:
        labels[0], labels[-1] = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    module = sys.modules["multigemm.ops.sort_by_group"]
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(module, "_by_kernel", lambda *_, answer=by_kernel: answer)
        found.append(module.order_and_ends(labels, groups))
    order = multigemm.sort_by_group(labels, groups)
    sizes = order.group_sizes
    live = int(sizes.sum())
    for permutation, inverse, ends in found:
        assert torch.equal(ends.long(), sizes.cumsum(0))
        assert torch.equal(permutation[:live].long(), order.permutation[:live])
        assert torch.equal(permutation.long()[inverse.long()], torch.arange(rows, device=device))
