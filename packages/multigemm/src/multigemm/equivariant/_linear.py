"""``IndexedLinear``: an equivariant linear map of its own for each element (or system, or any other label).

    y[n, o] = sum over input blocks i of the irrep of o of  f(o) * x[n, i] @ W[element(n), i, o]

The 2l+1 components share the weights, so they are rows of the same product and W is read in place. MACE's
``skip_tp``, a ``FullyConnectedTensorProduct`` with one-hot elements, and cuEquivariance's
``Linear(weight_classes=...)`` are this map.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _choice
from .._errors import DeviceError, DTypeError, OptionError, ShapeError
from ..ops import GroupOrder
from . import _linear_map
from ._irreps import Irreps
from ._irreps import layout as read_layout
from ._rows import Places, order_of, places_of

NORMALIZATIONS = ("element", "path", "none")


class Path(NamedTuple):
    """From one input block to one output block of the same irrep: columns ``start`` .. of the weights are
    [mul_in, mul_out]."""

    block_in: int
    block_out: int
    start: int
    stop: int
    factor: float


def paths(irreps_in: Irreps, irreps_out: Irreps, normalization: str) -> list[Path]:
    """Every path, in e3nn's and cuEquivariance's order of their weights: by input block, then output block.

    The factor is 1 / sqrt(terms of the sum) with "element", 1 / sqrt(mul_in * paths of that output block)
    with "path", 1 with "none": e3nn's ``path_normalization``, of one element.
    """
    pairs = [(i, o) for i, a in enumerate(irreps_in) for o, b in enumerate(irreps_out) if a.ir == b.ir]
    result, at = [], 0
    for i, o in pairs:
        sources = [irreps_in[a].mul for a, b in pairs if b == o]
        terms = {"element": sum(sources), "path": irreps_in[i].mul * len(sources), "none": 1}[normalization]
        size = irreps_in[i].mul * irreps_out[o].mul
        result.append(Path(i, o, at, at + size, 1 / math.sqrt(max(terms, 1))))
        at += size
    return result


def plan(irreps_in: Irreps, irreps_out: Irreps, layout: str, found: list[Path]) -> _linear_map.Plan:
    """The same for ``_linear_map``."""

    def blocks(irreps: Irreps) -> list[_linear_map.Block]:
        found = zip(irreps.starts(), irreps, strict=True)
        return [_linear_map.Block(start, block.mul, block.ir.dim) for start, block in found]

    steps = [_linear_map.Step(p.block_in, p.block_out, p.start, p.factor) for p in found]
    weights = found[-1].stop if found else 0
    return _linear_map.plan(blocks(irreps_in), blocks(irreps_out), steps, layout == "mul_ir", weights)


class IndexedLinear(nn.Module):
    """A linear map over irreps with weights of its own for each element.

    Args:
        irreps_in, irreps_out: text such as "128x0e + 128x1o", or e3nn's or cuEquivariance's irreps.
        num_elements: G.
        layout: "mul_ir", the columns of a block are [mul, 2l+1] as in e3nn and MACE, or "ir_mul",
            [2l+1, mul]: of input and output.
        path_normalization: "element", "path" or "none", as in e3nn.
        device, dtype: of the weights.

    The parameter ``weight`` [G, weight_numel] is normally distributed with variance 1; for each path its
    columns are [mul_in, mul_out]. There is no other state.

    Raises:
        OptionError: irreps, layout or normalisation that cannot be read.
    """

    def __init__(
        self,
        irreps_in: Any,
        irreps_out: Any,
        num_elements: int,
        *,
        layout: str = "mul_ir",
        path_normalization: str = "element",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = Irreps(irreps_in), Irreps(irreps_out)
        self.num_elements = num_elements
        self.layout = read_layout(layout)
        if path_normalization not in NORMALIZATIONS:
            raise OptionError(
                f"IndexedLinear: path_normalization must be one of {', '.join(NORMALIZATIONS)}, "
                f"got {path_normalization!r}."
            )
        if num_elements < 0:
            raise OptionError(f"IndexedLinear: num_elements must not be negative, got {num_elements}.")
        self.path_normalization = path_normalization
        self.paths = paths(self.irreps_in, self.irreps_out, path_normalization)
        self.weight_numel = self.paths[-1].stop if self.paths else 0
        self._plan = plan(self.irreps_in, self.irreps_out, self.layout, self.paths)
        self.weight = nn.Parameter(torch.empty(num_elements, self.weight_numel, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        order: GroupOrder | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [N, irreps_in.dim] -> [N, irreps_out.dim].

        Args:
            labels: the element of each row: integers [N] in any order, or one-hot [N, G]. A row without an
                element (a label outside 0 .. G-1, a row of zeros) gives zeros.
            order: ``sort_by_group(labels, G)`` instead, sorted once and shared between layers.
            weight: [G, weight_numel] instead of the module's own.
        """
        op = "IndexedLinear"
        if x.dim() != 2 or x.shape[1] != self.irreps_in.dim:
            raise ShapeError(f"{op}: x must have shape [N, {self.irreps_in.dim}], got {list(x.shape)}.")
        w = self.weight if weight is None else weight
        if w.shape != (self.num_elements, self.weight_numel):
            raise ShapeError(
                f"{op}: weight must have shape [{self.num_elements}, {self.weight_numel}], "
                f"got {list(w.shape)}."
            )
        if w.device != x.device:
            raise DeviceError(f"{op}: x must be on the device of the weights, {w.device}, got {x.device}.")
        if w.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise DTypeError(f"{op}: x must have the dtype of the weights, {w.dtype}, got {x.dtype}.")
        name = _choice.pinned()
        if _linear_map.direct(x, w):
            places = places_of(op, labels, order, x, self.num_elements)
            return _linear_map.by_kernels(self._plan, x, w, places, name)
        permutation, sizes, inverse = order_of(op, labels, order, x, self.num_elements)
        return _linear_map.composed(
            self._plan, x, w, Places(permutation, inverse, sizes, False), name or None
        )

    def extra_repr(self) -> str:
        return (
            f"{self.irreps_in} -> {self.irreps_out}, num_elements={self.num_elements}, "
            f"layout={self.layout!r}, {self.weight_numel} weights an element"
        )

    # --- the same map in other packages --------------------------------------------------------------

    @classmethod
    def from_e3nn(cls, product: Any) -> IndexedLinear:
        """From e3nn's ``FullyConnectedTensorProduct(irreps, "Gx0e", irreps)``.

        The second input has to be one-hot elements. The weights are copied. Raises ``OptionError`` where the
        module is another product than that.
        """
        elements = Irreps(product.irreps_in2)
        if len(elements) != 1 or str(elements[0].ir) != "0e" or getattr(product, "weight_numel", 0) == 0:
            raise OptionError(
                f"IndexedLinear.from_e3nn: the second input must be one-hot elements, such as 89x0e, "
                f"and weights internal; got {elements or 'nothing'}."
            )
        weight = product.weight
        made = cls(
            product.irreps_in1,
            product.irreps_out,
            elements[0].mul,
            device=weight.device,
            dtype=weight.dtype,
        )
        made._exchange(product, "e3nn", into=False)
        made.weight.requires_grad_(weight.requires_grad)
        return made.train(product.training)

    def copy_to_e3nn(self, product: Any) -> None:
        """Write the weights into a ``FullyConnectedTensorProduct`` of the same irreps and elements."""
        self._exchange(product, "e3nn", into=True)

    @torch.no_grad()
    def _exchange(self, product: Any, name: str, into: bool) -> None:
        """Weights from, or into, the product: [mul_in, G, mul_out] for each of its paths there, with a factor
        sqrt(coefficient); the coupling (l, 0, l) brings 1 / sqrt(2l+1)."""
        instructions = {(ins.i_in1, ins.i_out): ins for ins in product.instructions if ins.has_weight}
        mine = {(path.block_in, path.block_out): path for path in self.paths}
        same = Irreps(product.irreps_in1) == self.irreps_in and Irreps(product.irreps_out) == self.irreps_out
        modes = {ins.connection_mode for ins in instructions.values()}
        if not same or instructions.keys() != mine.keys() or modes > {"uvw"}:
            raise OptionError(f"IndexedLinear: the {name} product has other irreps or paths than {self}.")
        at = 0
        flat = product.weight.view(-1)
        for key, ins in instructions.items():
            path, block_in, block_out = mine[key], self.irreps_in[key[0]], self.irreps_out[key[1]]
            size = (path.stop - path.start) * self.num_elements
            there = flat[at : at + size].view(block_in.mul, self.num_elements, block_out.mul).transpose(0, 1)
            here = self.weight[:, path.start : path.stop].unflatten(1, (block_in.mul, block_out.mul))
            ratio = ins.path_weight / math.sqrt(block_in.ir.dim) / path.factor
            if into:
                there.copy_(here / ratio)
            else:
                here.copy_(there * ratio)
            at += size

    @classmethod
    def from_cuequivariance(cls, linear: Any, layout: Any = "mul_ir") -> IndexedLinear:
        """From cuEquivariance's ``Linear(..., weight_classes=G)``; its weights are these, in the same places.

        ``layout`` is the one that ``linear`` was made with, for input and output; the module does not tell.
        """
        weight = getattr(linear, "weight", None)
        classes = getattr(linear, "weight_classes", None)
        if weight is None or classes is None:
            raise OptionError(
                "IndexedLinear.from_cuequivariance: the module must have internal weights and weight_classes."
            )
        made = cls(
            linear.irreps_in,
            linear.irreps_out,
            classes,
            layout=layout,
            device=weight.device,
            dtype=weight.dtype,
        )
        made._same_as(linear)
        made.weight.requires_grad_(weight.requires_grad)
        with torch.no_grad():
            made.weight.copy_(weight)
        return made.train(linear.training)

    @torch.no_grad()
    def copy_to_cuequivariance(self, linear: Any) -> None:
        """Write the weights into a ``Linear(..., weight_classes=G)`` of the same irreps and elements."""
        self._same_as(linear)
        linear.weight.copy_(self.weight)

    def _same_as(self, linear: Any) -> None:
        same = (
            Irreps(linear.irreps_in) == self.irreps_in
            and Irreps(linear.irreps_out) == self.irreps_out
            and tuple(linear.weight.shape) == tuple(self.weight.shape)
            and self.path_normalization == "element"
        )
        if not same:
            raise OptionError(f"IndexedLinear: the module has other irreps or elements than {self}.")
