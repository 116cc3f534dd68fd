"""The symmetric contraction of a MACE model, by this library and by others.

- loop: OpenEquivariance's algorithm in torch's operators: matrices for all elements from couplings and
  weights, atoms sorted, one bmm for each element that is present, gathers. Sizes and order are known to the
  host. "loop, kept" has the matrices made before, where weights are frozen.
- mace: the module of mace-torch, einsums over one-hot elements.
- cuequivariance: its module with the independent couplings, columns [2l+1, C] as it wants them.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from ... import _dispatch
from ...equivariant import Irreps, SymmetricContraction
from ...ops import sort_by_group
from .sides import Atoms, Model, Problem, Side, data, normal

PEERS = ("loop", "loop, kept", "mace", "cuequivariance")
CORRELATION = 3


def problem(model: Model, atoms: Atoms, dtype: torch.dtype, device: torch.device) -> Problem:
    torch.manual_seed(0)
    irreps = model.irreps(data().inputs), model.irreps(model.outputs)
    module = SymmetricContraction(
        *irreps, CORRELATION, num_elements=model.elements, device=device, dtype=torch.float64
    )
    weights64 = [[w.detach().clone() for w in own] for own in module._weights()]
    module = module.to(dtype)
    labels, rare = atoms.draw(model.elements)
    labels = labels.to(device)
    width = sum(block.ir.dim for block in module.irreps_in)
    shape = (atoms.count, model.channels, width)
    x, u = (normal(shape, seed, dtype, device) for seed in (1, 2))
    gy = normal((atoms.count, module.irreps_out.dim), 3, dtype, device)
    rows = (labels == rare).nonzero().squeeze(1)
    bases = [[c.basis(nu).to(device) for nu in range(c.correlation, 0, -1)] for c in _contractions(module)]
    own = [w[rare] for ws in weights64 for w in ws]
    reference = Side(
        lambda x: _dense(x, bases, reference.weights), own, x[rows].double(), gy[rows].double(),
        u[rows].double(),
    )  # fmt: skip
    mine = Side(lambda x: module(x, labels), [w for ws in module._weights() for w in ws], x, gy, u)
    loop = _Loop(bases, labels, model, dtype)

    def looped(kept: bool) -> Side:
        weights = [w.detach().to(dtype).clone() for ws in weights64 for w in ws]
        matrices = loop.matrices(weights) if kept else None
        return Side(lambda x: loop(x, weights, matrices), weights, x, gy, u)

    backend = _dispatch.backend_for(device.type)
    return Problem(
        labels, rare, mine, reference,
        {
            "loop": lambda: looped(False),
            "loop, kept": lambda: looped(True),
            "mace": lambda: _mace(module, labels, mine),
            "cuequivariance": lambda: _cuequivariance(module, weights64, labels, mine),
        },
        f"{backend.name if backend else 'torch'}: {module.explain().path}",
        _floor(module, model, atoms, len(labels.unique()), dtype),
        lambda peer, op: _temporaries(peer, op, module, model, atoms, dtype),
    )  # fmt: skip


def _contractions(module: SymmetricContraction) -> Any:
    return module.contractions


def _dense(x: torch.Tensor, bases: list[list[torch.Tensor]], weights: list[torch.Tensor]) -> torch.Tensor:
    """x [n, C, D] of one element, its weights [P, C] by output and falling degree -> columns of y."""
    outputs, flat = [], iter(weights)
    for own in bases:
        total: Any = 0.0
        for basis in own:
            nu = basis.dim() - 2
            letters = "ijk"[:nu]
            factors = ",".join(f"nc{letter}" for letter in letters)
            matrix = torch.einsum(f"d{letters}p,pc->cd{letters}", basis, next(flat))
            total = total + torch.einsum(f"cd{letters},{factors}->ncd", matrix, *[x] * nu)
        outputs.append(total.flatten(1))
    return torch.cat(outputs, 1)


class _Loop:
    """OpenEquivariance's algorithm. Bases by output and falling degree, the highest being 3 or less."""

    def __init__(
        self, bases: list[list[torch.Tensor]], labels: torch.Tensor, model: Model, dtype: torch.dtype
    ) -> None:
        self.bases = [[basis.to(dtype) for basis in own] for own in bases]
        order = sort_by_group(labels, model.elements)
        self.permutation, self.inverse = order.permutation, order.inverse
        self.labels = labels[order.permutation]
        sizes = order.group_sizes.tolist()
        self.present = [(g, n) for g, n in enumerate(sizes) if n]

    def matrices(self, weights: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For all elements: of the highest degree [G, C, D, M], of the others [C, G, M]."""
        made, flat = [], iter(weights)
        for own in self.bases:
            first, *rest = own
            top = torch.einsum("mkp,epc->eckm", first.flatten(0, -3), next(flat))
            made.append(
                [top, *(torch.einsum("mp,epc->cem", basis.flatten(0, -2), next(flat)) for basis in rest)]
            )
        return made

    def __call__(
        self, x: torch.Tensor, weights: list[torch.Tensor], kept: list[list[torch.Tensor]] | None
    ) -> torch.Tensor:
        rows = x.index_select(0, self.permutation).transpose(0, 1)  # [C, N, D]
        parts = rows.split([n for _, n in self.present], 1)
        outputs = []
        for own, made in zip(self.bases, kept or self.matrices(weights), strict=True):
            top = made[0].unbind(0)
            products = [torch.bmm(part, top[g]) for (g, _), part in zip(self.present, parts, strict=True)]
            total = torch.cat(products, 1)  # [C, N, M]
            for basis, matrix in zip(own[1:], made[1:], strict=True):
                total = total + matrix.index_select(1, self.labels)
                total = (total.unflatten(2, (-1, basis.shape[-2])) * rows.unsqueeze(2)).sum(-1)
            outputs.append(total.index_select(1, self.inverse).transpose(0, 1).flatten(1))
        return torch.cat(outputs, 1)


def _mace(module: SymmetricContraction, labels: torch.Tensor, mine: Side) -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mace.modules.symmetric_contraction as theirs  # isort: split  # first, as it prepares e3nn
        from e3nn import o3

        made = _mace_module(
            theirs.SymmetricContraction, o3.Irreps, str(module.irreps_in), str(module.irreps_out), module
        )
    one_hot = torch.nn.functional.one_hot(labels, module.num_elements).to(mine.x.dtype)
    weights = [w for c in made.contractions for w in (c.weights_max, *c.weights)]
    return Side(lambda x: made(x, one_hot), weights, mine.x, mine.gy, mine.u)


def _mace_module(theirs: Any, irreps: Any, inputs: str, outputs: str, module: SymmetricContraction) -> Any:
    """Its couplings take longer to make than to use, so they are made in float64 once, and kept."""
    key = inputs, outputs, module.num_elements
    if key not in _made:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            _made.clear()
            _made[key] = theirs(
                irreps(inputs), irreps(outputs), CORRELATION, num_elements=module.num_elements
            )
        finally:
            torch.set_default_dtype(before)
    like = module._like()
    made = copy.deepcopy(_made[key]).to(like.device, like.dtype)
    module.copy_to_mace(made)
    return made


_made: dict[Any, Any] = {}


def _cuequivariance(
    module: SymmetricContraction, weights: list[list[torch.Tensor]], labels: torch.Tensor, mine: Side
) -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cuequivariance as cue
        import cuequivariance_torch as cuet
        from cuequivariance.group_theory.experimental.mace.symmetric_contractions import (
            symmetric_contraction,
        )

        from ...equivariant._cue_group import E3NNGroup

        inputs, outputs = (
            cue.Irreps(E3NNGroup, str(irreps)) for irreps in (module.irreps_in, module.irreps_out)
        )
        device, dtype = mine.x.device, mine.x.dtype
        made = cuet.SymmetricContraction(
            inputs, outputs, CORRELATION, module.num_elements, layout=cue.ir_mul, device=device, dtype=dtype,
            math_dtype=dtype, method="naive" if device.type == "cpu" else None,
        )  # fmt: skip
        _, projection = symmetric_contraction(inputs, outputs, range(1, CORRELATION + 1))
    whole = torch.cat([w for own in weights for w in own], 1)
    with torch.no_grad():
        reduced = torch.einsum("eac,ab->ebc", whole, torch.tensor(projection).to(whole))
        made.weight.copy_(reduced.reshape(made.weight.shape))
    channels = module.num_features
    indices = labels.to(torch.int32)

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).flatten(1).contiguous()

    return Side(
        lambda x: made(x, indices), [made.weight], turned(mine.x),
        to_ir_mul(mine.gy, module.irreps_out), turned(mine.u),
        lambda t: t.unflatten(1, (-1, channels)).transpose(1, 2), lambda t: to_mul_ir(t, module.irreps_out),
        comparable=False,
    )  # fmt: skip


def to_ir_mul(t: torch.Tensor, irreps: Irreps) -> torch.Tensor:
    """Columns of each block from [mul, 2l+1] to [2l+1, mul]."""
    parts = t.split([block.dim for block in irreps], 1)
    turned = [p.unflatten(1, (b.mul, b.ir.dim)).transpose(1, 2) for p, b in zip(parts, irreps, strict=True)]
    return torch.cat([p.flatten(1) for p in turned], 1)


def to_mul_ir(t: torch.Tensor, irreps: Irreps) -> torch.Tensor:
    """Columns of each block from [2l+1, mul] to [mul, 2l+1]."""
    parts = t.split([block.dim for block in irreps], 1)
    turned = [p.unflatten(1, (b.ir.dim, b.mul)).transpose(1, 2) for p, b in zip(parts, irreps, strict=True)]
    return torch.cat([p.flatten(1) for p in turned], 1)


def _floor(module: SymmetricContraction, model: Model, atoms: Atoms, present: int, dtype: torch.dtype) -> Any:
    """Horner's rule takes two operations for each term, pair and head; its gradient in x twice as many, that
    in the coefficients as many, and each twice as many again along a direction. Bytes: each pass reads its
    inputs, the weights of the elements that are present among them, and writes its outputs, the gradients of
    all weights among them."""
    terms = module._terms + module.pairs.shape[0] + module.heads.shape[0]
    value = 2 * terms * atoms.count * model.channels
    x, y = atoms.count * model.channels * module._width, atoms.count * module.irreps_out.dim
    numbers = sum(w.shape[1] for own in module._weights() for w in own) * model.channels
    read, written = present * numbers, model.elements * numbers
    forward, backward = x + read + y, x + y + read + x
    operations = {"forward": 1, "forward+backward x": 3, "forward+backward": 4, "double backward": 11}
    traffic = {
        "forward": forward,
        "forward+backward x": forward + backward,
        "forward+backward": forward + backward + written,
        "double backward": forward + 2 * backward + x + y + written,
    }
    return lambda op: (value * operations[op], traffic[op] * dtype.itemsize)


def _temporaries(
    peer: str, op: str, module: SymmetricContraction, model: Model, atoms: Atoms, dtype: torch.dtype
) -> float:
    if peer == "cuequivariance":
        return 0.0
    dims = [block.ir.dim for block in module.irreps_out]
    width = module._width
    matrices = 2 * model.elements * model.channels * sum(dims) * width**3
    rows = 4 * atoms.count * model.channels * max(dims) * width**2
    passes = {"forward": 1.0, "forward+backward x": 2.0, "forward+backward": 2.0, "double backward": 4.0}
    return (
        (matrices * min(passes[op], 2.0) + rows * passes[op]) * dtype.itemsize * (2 if peer == "mace" else 1)
    )
