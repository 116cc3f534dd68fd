"""Many threads and forked processes: no state between calls.

The failure: routing state or handles shared between threads, and locks or pools that a fork leaves broken.
https://github.com/facebookresearch/fairchem/issues/1481 https://github.com/pytorch/pytorch/issues/81758
"""

from __future__ import annotations

import os
import threading

import pytest
import torch

import multigemm


def work(seed: int, device: torch.device, name: str | None) -> tuple[torch.Tensor, ...]:
    """Forward and backward with sizes of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 6, (5,), generator=generator)
    x = torch.randn(40, 3, 7, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    w = torch.randn(5, 3, 7, 6, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    y = multigemm.grouped_mm(x, w, sizes.to(device), implementation=name)
    gx, gw = torch.autograd.grad(y.sin().sum(), (x, w))
    return y.detach(), gx, gw


def test_eight_threads(implementation: str, device: torch.device) -> None:
    name = implementation or None
    expected = [work(seed, device, name) for seed in range(8)]
    barrier = threading.Barrier(8)
    failures: list[str] = []

    def run(seed: int) -> None:
        barrier.wait()
        for _ in range(20):
            for ours, theirs in zip(work(seed, device, name), expected[seed], strict=True):
                if not torch.equal(ours, theirs):
                    failures.append(f"thread {seed}: off by {(ours - theirs).abs().max().item():.2e}")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes(implementation: str, device: torch.device) -> None:
    """The parent has computed before, so that whatever it opened is inherited."""
    if device.type != "cpu":
        pytest.skip("a GPU does not survive a fork; tests/gpu/test_devices.py has what is told then")
    name = implementation or None
    x, w, sizes = torch.randn(40, 3, 7), torch.randn(5, 3, 7, 6), [9, 0, 20, 1, 8]

    def products() -> tuple[
        torch.Tensor, torch.Tensor
    ]:  # no autograd: torch refuses it in a child of a CUDA process
        y = multigemm.grouped_mm(x, w, sizes, implementation=name)
        return y, multigemm.grouped_mm_wgrad(x, y, sizes, implementation=name)

    expected = products()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # torch's own pool does not survive a fork
            same = all(torch.equal(a, b) for a, b in zip(products(), expected, strict=True))
            code = 0 if same else 2
        finally:
            os._exit(code)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
