"""Layouts that other implementations refuse: odd widths, misaligned starts, expanded operands.

The failure: "strides should be a multiple of 16 bytes", or a wrong answer.
https://github.com/huggingface/transformers/issues/48644 https://github.com/pytorch/torchtitan/issues/1265
https://github.com/huggingface/transformers/pull/44827 https://github.com/NVIDIA/cutlass/issues/2380
"""

from __future__ import annotations

import subprocess
import sys

import oracle
import pytest
import torch

import multigemm


def test_odd_width_with_transposed_weights(pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 1025, device=device).bfloat16()
    w = torch.randn(4, 512, 1025, device=device).bfloat16().mT
    y = multigemm.grouped_mm(x, w, offsets=torch.tensor([2, 4, 6, 8], dtype=torch.int32, device=device))
    oracle.assert_close(y, oracle.grouped_mm(x, w, [2, 2, 2, 2]), torch.bfloat16, 1025, 8.0)


def test_weights_at_an_odd_place_of_a_flat_buffer(pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    flat = torch.randn(1 + 3 * 16 * 24, device=device).bfloat16()
    w = flat[1:].view(3, 24, 16).mT
    assert w.data_ptr() % 16 != 0
    x = torch.randn(10, 16, device=device).bfloat16()
    y = multigemm.grouped_mm(x, w, [3, 0, 7])
    oracle.assert_close(y, oracle.grouped_mm(x, w, [3, 0, 7]), torch.bfloat16, 16, 8.0)


def test_one_matrix_expanded_over_groups_and_batch(pinned: str, device: torch.device) -> None:
    torch.manual_seed(0)
    w = torch.randn(7, 5, device=device).expand(3, 4, 7, 5)
    x = torch.randn(6, 1, 7, device=device).expand(6, 4, 7)
    y = multigemm.grouped_mm(x, w, [1, 2, 3])
    oracle.assert_close(y, oracle.grouped_mm(x, w, [1, 2, 3]), torch.float32, 7, 8.0)
    dw = multigemm.grouped_mm_wgrad(x, y[:, :1].expand(6, 4, 5), [1, 2, 3])
    oracle.assert_close(
        dw, oracle.grouped_mm_wgrad(x, y[:, :1].expand(6, 4, 5), [1, 2, 3]), torch.float32, 6, 40.0
    )


SHARED = """
import resource, sys, torch, multigemm
name = sys.argv[1] or None
x, w = torch.randn(2, 2048, 256), torch.randn(2, 1, 256, 256, requires_grad=True)
multigemm.grouped_mm(x[:, :1], w, [1, 1], implementation=name).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
w.grad = None
y = multigemm.grouped_mm(x, w, [1, 1], implementation=name)
y.sum().backward()
assert w.grad.shape == w.shape
torch.testing.assert_close(w.grad[0, 0], x[0].sum(0)[:, None].expand(256, 256), atol=1e-2, rtol=1e-3)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_no_copy_of_shared_weights(implementation: str, device: torch.device) -> None:
    """[G, 1, K, M] is used as it is, forward and backward: [G, B, K, M] would be one GiB here."""
    if device.type != "cpu":
        pytest.skip("the peak is read from the process, which is about host memory")
    done = subprocess.run(
        [sys.executable, "-c", SHARED, implementation], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200, f"{done.stdout} MiB more at the peak"
