"""The skip product of a MACE model, a linear map over irreps for each element, by this library and by others.

- loop: atoms sorted, one mm for each element that is present and each irrep, gathers. Sizes and order are
  known to the host.
- e3nn: the FullyConnectedTensorProduct with one-hot elements, which MACE has.
- cuequivariance: its linear map of weight classes; atoms are gathered in the order of elements, which it
  wants.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

import multigemm

from ...equivariant import IndexedLinear
from ...ops import sort_by_group
from .sides import Atoms, Model, Problem, Side, normal

PEERS = ("loop", "e3nn", "cuequivariance")


def problem(model: Model, atoms: Atoms, dtype: torch.dtype, device: torch.device) -> Problem:
    torch.manual_seed(0)
    irreps = model.irreps(model.outputs)
    module = IndexedLinear(irreps, irreps, model.elements, device=device, dtype=torch.float64)
    weight64 = module.weight.detach().clone()
    module = module.to(dtype)
    labels, rare = atoms.draw(model.elements)
    labels = labels.to(device)
    shape = (atoms.count, module.irreps_in.dim)
    x, u, gy = (normal(shape, seed, dtype, device) for seed in (1, 2, 3))
    rows = (labels == rare).nonzero().squeeze(1)
    reference = Side(
        lambda x: _dense(x, module, reference.weights[0]), [weight64[rare]], x[rows].double(),
        gy[rows].double(), u[rows].double(),
    )  # fmt: skip
    mine = Side(lambda x: module(x, labels), [module.weight], x, gy, u)
    order = sort_by_group(labels, model.elements)
    present = [(g, n) for g, n in enumerate(order.group_sizes.tolist()) if n]

    def looped() -> Side:
        weight = weight64.to(dtype).clone()
        return Side(lambda x: _loop(x, module, weight, order, present), [weight], x, gy, u)

    return Problem(
        labels, rare, mine, reference,
        {
            "loop": looped,
            "e3nn": lambda: _e3nn(module, labels, mine),
            "cuequivariance": lambda: _cuequivariance(module, labels, order, mine),
        },
        _kernel(module, order, x),
        _floor(model, atoms, module, len(present), dtype),
        lambda peer, op: _temporaries(peer, model, atoms, module, dtype),
    )  # fmt: skip


def _dense(x: torch.Tensor, module: IndexedLinear, weight: torch.Tensor) -> torch.Tensor:
    """x [n, columns] of one element, its weights [weight_numel] -> y; each block has one path."""
    outputs = []
    for path, part in zip(module.paths, x.split([b.dim for b in module.irreps_in], 1), strict=True):
        block = module.irreps_in[path.block_in]
        matrix = weight[path.start : path.stop].view(block.mul, block.mul)
        rows = part.unflatten(1, (block.mul, block.ir.dim))
        outputs.append((torch.einsum("nui,uv->nvi", rows, matrix) * path.factor).flatten(1))
    return torch.cat(outputs, 1)


def _loop(
    x: torch.Tensor, module: IndexedLinear, weight: torch.Tensor, order: Any, present: list[tuple[int, int]]
) -> torch.Tensor:
    rows = x.index_select(0, order.permutation)
    sizes = [n for _, n in present]
    outputs = []
    for path, part in zip(module.paths, rows.split([b.dim for b in module.irreps_in], 1), strict=True):
        block = module.irreps_in[path.block_in]
        matrices = weight[:, path.start : path.stop].unflatten(1, (block.mul, block.mul)).unbind(0)
        folded = part.unflatten(1, (block.mul, block.ir.dim)).transpose(1, 2).flatten(0, 1)
        pieces = folded.split([n * block.ir.dim for n in sizes])
        y = torch.cat([torch.mm(p, matrices[g]) for (g, _), p in zip(present, pieces, strict=True)])
        outputs.append((y * path.factor).unflatten(0, (-1, block.ir.dim)).transpose(1, 2).flatten(1))
    return torch.cat(outputs, 1).index_select(0, order.inverse)


def _e3nn(module: IndexedLinear, labels: torch.Tensor, mine: Side) -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mace.modules  # noqa: F401  # which lets e3nn 0.4 read its tables
        from e3nn import o3

        before = torch.get_default_dtype()
        torch.set_default_dtype(mine.x.dtype)
        try:
            made = o3.FullyConnectedTensorProduct(
                str(module.irreps_in), f"{module.num_elements}x0e", str(module.irreps_out)
            ).to(mine.x.device)
        finally:
            torch.set_default_dtype(before)
    module.copy_to_e3nn(made)
    one_hot = torch.nn.functional.one_hot(labels, module.num_elements).to(mine.x.dtype)
    return Side(lambda x: made(x, one_hot), [made.weight], mine.x, mine.gy, mine.u, comparable=False)


def _cuequivariance(module: IndexedLinear, labels: torch.Tensor, order: Any, mine: Side) -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cuequivariance as cue
        import cuequivariance_torch as cuet

        from .contractions import to_ir_mul, to_mul_ir

        device, dtype = mine.x.device, mine.x.dtype
        irreps = cue.Irreps("O3", str(module.irreps_in))
        made = cuet.Linear(
            irreps, irreps, layout=cue.ir_mul, weight_classes=module.num_elements, internal_weights=True,
            device=device, dtype=dtype, method="naive" if device.type == "cpu" else "indexed_linear",
        )  # fmt: skip
    module.copy_to_cuequivariance(made)
    indices = labels[order.permutation].to(torch.int32)

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = made(x.index_select(0, order.permutation), weight_indices=indices)
        return y.index_select(0, order.inverse)

    def there(t: torch.Tensor) -> torch.Tensor:
        return to_ir_mul(t, module.irreps_in)

    def back(t: torch.Tensor) -> torch.Tensor:
        return to_mul_ir(t, module.irreps_in)

    return Side(call, [made.weight], there(mine.x), there(mine.gy), there(mine.u), back, back)


def _kernel(module: IndexedLinear, order: Any, x: torch.Tensor) -> str:
    """Of the products of the blocks, as ``explain`` tells them."""
    names = []
    for path in module.paths:
        block = module.irreps_in[path.block_in]
        w = module.weight[:, path.start : path.stop].unflatten(1, (1, block.mul, block.mul))
        rows = x.new_empty(x.shape[0], block.ir.dim, block.mul)
        found = multigemm.explain(rows, w, order.group_sizes)
        names.append(f"{found.implementation}: {found.kernel}")
    return " + ".join(dict.fromkeys(names))


def _floor(model: Model, atoms: Atoms, module: IndexedLinear, present: int, dtype: torch.dtype) -> Any:
    """Every pass is one product, reads its inputs, the weights of the elements that are present among them,
    and writes its output; the gradient of the weights is written for all elements."""
    product = 2 * atoms.count * module.irreps_in.dim * model.channels
    x, read, written = (
        atoms.count * module.irreps_in.dim,
        present * module.weight_numel,
        model.elements * module.weight_numel,
    )
    operations = {"forward": 1, "forward+backward x": 2, "forward+backward": 3, "double backward": 4}
    one = 2 * x + read
    traffic = {
        "forward": one,
        "forward+backward x": 2 * one,
        "forward+backward": 2 * one + x + written,
        "double backward": 3 * one + 2 * x + written,
    }
    return lambda op: (product * operations[op], traffic[op] * dtype.itemsize)


def _temporaries(peer: str, model: Model, atoms: Atoms, module: IndexedLinear, dtype: torch.dtype) -> float:
    """e3nn's product with one-hot elements has G C numbers for each component of an atom."""
    grown = model.elements * atoms.count * module.irreps_in.dim if peer == "e3nn" else 0
    return float(4 * grown * dtype.itemsize)
