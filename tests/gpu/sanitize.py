"""Runs every kernel once over small odd shapes, for compute-sanitizer; checks values too; layers
need pydantic.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py native simt
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py

Outputs are lent full of NaN: what a kernel leaves out shows in the values. initcheck does not see what the
copy engine writes, so without that it would take the outputs of Hopper's weight gradient for unwritten.

Arguments are implementations, by default native, simt and blas. PyTorch's caching allocator is turned off,
so that each tensor is an allocation of its own, whose bounds the tool knows. Takes some seconds without
the tool.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu import kit

CASES = [
    kit.Case("aligned", (70, 0, 33), 64, 136, rest=5, bias=True),
    kit.Case("aligned, transposed w", (70, 0, 33), 136, 64, w="transposed", offsets=True, index=torch.int32),
    kit.Case("odd", (65, 0, 30), 37, 19, rest=2, bias=True),
    kit.Case("odd address", (65, 0, 30), 40, 24, x="unaligned", w="unaligned", gy="unaligned"),
    kit.Case("cut", (9, 0, 140), 48, 40, x="cut", gy="cut", w="cut"),
    kit.Case("stepped", (9, 40), 24, 40, x="stepped", gy="stepped"),
    kit.Case("expanded", (20, 3), 32, 32, x="expanded", gy="scalar"),
    kit.Case("few rows", (1, 0, 2, 1), 264, 72),
    kit.Case("no rows", (0, 0), 16, 16, rest=3, bias=True),
    kit.Case("many groups", tuple(n % 2 for n in range(1100)), 8, 8),
    kit.Case("batch", (20, 0, 7), 16, 24, b=3, rest=1, bias=True),
    kit.Case("batch, shared w", (20, 0, 7), 16, 24, b=3, shared=True, rest=1),
    kit.Case("batch, odd", (20, 7), 5, 3, b=4, x="cut oddly", gy="cut oddly"),
    kit.Case("tall", (3, 0, 1100, 40), 40, 24, b=2, rest=1),
]


def poisoned(shape: torch.Size, p: kit.Operands) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=p.case.out_dtype or p.dtype, device="cuda")


def layers() -> int:
    """The layers' own kernels: values, and gradients, beside the same layer in float64."""
    from multigemm.equivariant import SymmetricContraction
    from multigemm.moe import MoEConfig, MoEFeedForward

    ran = 0
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float32, 1e-4)):
        torch.manual_seed(1)
        config = MoEConfig(hidden_size=72, intermediate_size=40, num_experts=9, top_k=3, input_dtype=dtype)
        layer = MoEFeedForward(config, implementation="multigemm_native_moe", device="cuda")
        for tokens in (5, 90):
            x = torch.randn(tokens, 72, device="cuda").to(dtype)
            with torch.no_grad():
                routing = layer.route(x)
                y = layer(x)
            exact = layer.gate_up_proj.double(), layer.down_proj.double()
            expected = torch.zeros(tokens, 72, dtype=torch.float64, device="cuda")
            for slot in range(3):
                chosen = routing.experts[:, slot]
                h = torch.einsum("th,thi->ti", x.double(), exact[0][chosen])
                gate, up = h.chunk(2, -1)
                part = torch.einsum("ti,tih->th", torch.nn.functional.silu(gate) * up, exact[1][chosen])
                expected += part * routing.weights[:, slot, None].double()
            assert (y - expected).abs().max() <= tolerance * expected.abs().max(), (dtype, tokens)
            leaf = x.clone().requires_grad_()
            torch.autograd.grad(layer(leaf).square().sum(), [leaf, *layer.parameters()])
            ran += 2
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(2)
        module = SymmetricContraction("5x0e+5x1o", "5x0e+5x1o", 3, num_elements=4, dtype=dtype)
        x, labels = torch.randn(11, 5, 4, dtype=dtype), torch.randint(4, (11,))
        found = []
        for device in ("cpu", "cuda"):
            module, leaf = module.to(device), x.to(device).requires_grad_()
            y = module(leaf, labels.to(device))
            (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), [leaf, *module.parameters()])
            found.append([t.cpu() for t in (y, first, *second)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
        ran += 3
    return ran


def main() -> int:
    names = sys.argv[1:] or ["native", "simt", "blas"]
    ran = 0
    for case in CASES:
        for dtype in kit.DTYPES:
            p = kit.make(case, dtype)
            for name in names:
                for where in ("device", "host"):
                    p.check_forward(p.forward(name, where, out=poisoned(p.gy.shape, p)))
                    p.check_wgrad(p.wgrad(name, where, out=poisoned(p.w.shape, p)))
                    ran += 2
    calls = layers()
    torch.cuda.synchronize()
    print(f"{ran} products and {calls} calls of layers checked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
