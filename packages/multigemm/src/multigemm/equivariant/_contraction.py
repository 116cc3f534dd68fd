"""``SymmetricContraction``: MACE's product of many-body features, with weights for each element.

    y[n, c] = sum over nu and paths p of  w_nu[element(n), p, c] * U_nu[.., p] contracted with nu copies of
    x[n, c]

Constructor, parameters and state dict are MACE's (arXiv:2206.07697, equations 10 and 11); how it is computed
is not: see ``_terms.py`` for the polynomial and ``_grouped.py`` for the way it is evaluated.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import _choice, _route_polynomial
from .._errors import DeviceError, DTypeError, OptionError, ShapeError
from ..ops import GroupOrder, _direct
from ..ops.indexed_polynomial import Polynomial, at_once, evaluated
from . import _grouped, _paths
from ._cache import Kept, Place, coefficients, present, traced
from ._irreps import Irreps
from ._irreps import layout as read_layout
from ._rows import labels_of, order_of
from ._terms import Setting, fingerprint, projection, shared, terms
from ._weights import Contraction

_TABLES = ("heads", "pairs", "last", "factors", "entries", "entry_ends", "places")
_tables = operator.itemgetter(*_TABLES)
_tables_whole = operator.itemgetter(*_TABLES[:-1], "places_whole")
_requires_grad = operator.attrgetter("requires_grad")


class SymmetricContraction(nn.Module):
    """MACE's symmetric contraction: the same constructor, parameters, state dict and values.

    Args:
        irreps_in: blocks of the same number of channels C, such as "128x0e + 128x1o + 128x2e"; text, or
        e3nn's
            or cuEquivariance's irreps. D is the width of one channel.
        irreps_out: what comes out, each block with C channels.
        correlation: the highest degree, 1 to 3; or a mapping with one for each block of ``irreps_out``.
        irrep_normalization, path_normalization: "component" and "element"; accepted as MACE accepts them.
        use_reduced_cg: use cuEquivariance's independent couplings instead of all paths; needs cuequivariance.
        internal_weights, shared_weights: weights are the module's own; nothing else is offered.
        num_elements: G.
        layout_in, layout_out: columns of a block are [C, 2l+1] ("mul_ir") or [2l+1, C] ("ir_mul").
        implementation: "fused", one kernel, or "grouped", by ``grouped_mm``; None leaves the choice to the
            module: see ``explain``.
        device, dtype: of the weights.

    What the weights stand for, a few independent coefficients for each element, is kept between calls while
    no weight requires a gradient, and made again once a weight was written to. The grouped way keeps more, of
    the elements that are present.

    Raises:
        OptionError: an argument that cannot be read or that is not offered.
    """

    matrix_places: torch.Tensor
    pair_factors: torch.Tensor
    heads: torch.Tensor
    pairs: torch.Tensor
    last: torch.Tensor
    factors: torch.Tensor
    entries: torch.Tensor
    entry_ends: torch.Tensor
    places: torch.Tensor
    places_whole: torch.Tensor

    def __init__(
        self,
        irreps_in: Any,
        irreps_out: Any,
        correlation: int | Mapping[Any, int],
        irrep_normalization: str | None = "component",
        path_normalization: str | None = "element",
        use_reduced_cg: bool = False,
        internal_weights: bool | None = None,
        shared_weights: Any = None,
        num_elements: int | None = None,
        *,
        layout_in: str = "mul_ir",
        layout_out: str = "mul_ir",
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "SymmetricContraction"
        for name, value, known in (
            ("irrep_normalization", irrep_normalization, ("component", "norm", "none", None)),
            ("path_normalization", path_normalization, ("element", "path", "none", None)),
        ):
            if value not in known:
                raise OptionError(f"{op}: {name} must be one of {known[:3]}, got {value!r}.")
        if internal_weights is False:
            raise OptionError(
                f"{op}: internal_weights=False is not offered; write into the module's weights."
            )
        if num_elements is None or num_elements < 0:
            raise OptionError(f"{op}: num_elements must be given, a number of elements, got {num_elements}.")
        self.irreps_in, self.irreps_out = Irreps(irreps_in), Irreps(irreps_out)
        channels = {block.mul for block in self.irreps_in}
        if len(channels) != 1 or not self.irreps_out:
            raise OptionError(
                f"{op}: the blocks of irreps_in must have the same number of channels and irreps_out some "
                f"block, got {self.irreps_in or 'nothing'} and {self.irreps_out or 'nothing'}."
            )
        (self.num_features,) = channels
        self.num_elements = num_elements
        self.layout_in, self.layout_out = read_layout(layout_in), read_layout(layout_out)
        self.implementation = _paths.checked(implementation)
        self.use_reduced_cg = bool(use_reduced_cg)
        degrees = (
            [int(correlation[block]) for block in irreps_out]
            if isinstance(correlation, Mapping)
            else [int(correlation)] * len(self.irreps_out)
        )
        self.setting = Setting(
            "+".join(f"1x{block.ir}" for block in self.irreps_in),
            tuple(f"1x{block.ir}" for block in self.irreps_out),
            tuple(degrees),
            self.use_reduced_cg,
        )
        found = terms(self.setting)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.contractions = nn.ModuleList(
            Contraction(self.setting, which, num_elements, self.num_features, like)
            for which in range(len(self.irreps_out))
        )
        places, factors = _grouped.matrix_places(found), _grouped.pair_factors(found)
        layouts = self.layout_in, self.layout_out
        few = shared(self.setting)
        made = _paths.tables(found, few, self.irreps_in, self.irreps_out, self.num_features, layouts)
        for name, table in {"matrix_places": places, "pair_factors": factors, **made}.items():
            self.register_buffer(name, table.to(device), persistent=False)
        self._fingerprint = fingerprint(self.setting)
        self._pair_counts = _grouped.pair_counts(found)
        self._width, self._terms = found.width, len(found.last)
        self._columns, self._columns_out = self.irreps_in.dim, self.irreps_out.dim
        # What x has beside its rows in columns, and whole where the layout is that of whole ones.
        shapes: list[tuple[int, ...]] = [(self._columns,), ()]
        if self.layout_in == "mul_ir":
            shapes[1] = self.num_features, found.width
        self._shapes = shapes
        self._kept = Kept()
        for name, table in self._numbers().items():
            self.register_buffer(name, table.to(self._like()), persistent=False)

    def _numbers(self) -> dict[str, torch.Tensor]:
        """The tables of floats, float64 on the CPU."""
        found, few = terms(self.setting), shared(self.setting)
        made = {f"coefficients_{which}": table for which, table in enumerate(found.coefficients)}
        made |= {f"mixtures_{which}": table for which, table in enumerate(few.mixtures)}
        return {**made, "factors": few.factors}

    def _weights(self) -> list[list[nn.Parameter]]:
        """Of each output, by falling degree."""
        if not torch.compiler.is_compiling():
            contractions: Any = self._modules["contractions"]
            return [c.all_weights() for c in contractions._modules.values()]
        return [c.all_weights() for c in self.contractions if isinstance(c, Contraction)]

    def _like(self) -> nn.Parameter:
        return self._weights()[0][0]

    def _places(self) -> list[Place]:
        contractions: Any = self._modules["contractions"]
        found: list[Place] = [(self._modules, "contractions", contractions)]
        for name, own in contractions._modules.items():
            found += [(contractions._modules, name, own), *own.places()]
        return found

    def _tables(self, name: str) -> list[torch.Tensor]:
        """ "coefficients" or "mixtures", of each output."""
        return [self.get_buffer(f"{name}_{which}") for which in range(len(self.irreps_out))]

    def _apply(self, fn: Any, recurse: bool = True) -> SymmetricContraction:
        before = self._like().dtype
        self._kept = Kept()  # which holds the weights that it was made of
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        like = self._like()
        if like.dtype != before:  # made anew, or what float32 rounded off would be missing in float64
            for name, table in self._numbers().items():
                setattr(self, name, table.to(like))
        return self

    # --- the call -------------------------------------------------------------------------------------

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, *, order: GroupOrder | None = None
    ) -> torch.Tensor:
        """x [N, C, D], or [N, irreps_in.dim] in ``layout_in`` -> [N, irreps_out's columns] in ``layout_out``.

        Args:
            labels: the element of each atom: integers [N] in any order, or one-hot [N, G]. An atom without an
                element (a label outside 0 .. G-1, a row of zeros) gives zeros.
            order: ``sort_by_group(labels, G)`` instead, sorted once and shared between layers.
        """
        if labels is not None and not torch.compiler.is_compiling():
            y = self._again(x, labels)
            if y is not None:
                return y
        op = "SymmetricContraction"
        self._check_shape(op, x)
        weights = self._weights()
        like = weights[0][0]
        if like.device != x.device:
            raise DeviceError(f"{op}: x must be on the device of the weights, {like.device}, got {x.device}.")
        if like.dtype != x.dtype:
            raise DTypeError(f"{op}: x must have the dtype of the weights, {like.dtype}, got {x.dtype}.")
        if _paths.path_of(self.implementation, x.device, x.dtype) == "fused":
            return self._fused(op, x, weights, labels, order)
        return self._grouped(op, x, weights, order_of(op, labels, order, x, self.num_elements))

    def _again(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """The result of nearly every call of a frozen module: one launch, and hardly a word beside it.

        None, with nothing done, where there is anything that this would have to say or to make.
        """
        w = self._kept.unchanged()
        if w is None or self.implementation == "grouped" or not _direct.plain(x):
            return None
        shape, device = x.shape, x.device
        whole = len(shape) == 3
        if shape[1:] != self._shapes[whole] or x.dtype is not w.dtype or w.device != device:
            return None
        if type(labels) is not torch.Tensor or labels.dtype is not torch.int64:
            return None
        if labels.shape != shape[:1] or labels.device != device:
            return None
        name = _choice.pinned()
        kernel = _route_polynomial.at_once(device, name)
        if kernel is None:
            return None
        tables = (_tables_whole if whole else _tables)(self._buffers)
        if whole:
            x = x.view(shape[0], self._columns) if x.is_contiguous() else x.flatten(1)
        return at_once(x, w, labels, (*tables, self._fingerprint), self._columns_out, name, kernel)

    def explain(self) -> _paths.ContractionExplanation:
        """Which way the contraction is computed where its weights are now, and why."""
        like = self._like()
        path, source, reason = _paths.choose(self.implementation, like.device, like.dtype)
        return _paths.ContractionExplanation(path, source, self._terms, reason)

    def _fused(
        self,
        op: str,
        x: torch.Tensor,
        weights: list[list[nn.Parameter]],
        labels: torch.Tensor | None,
        order: GroupOrder | None,
    ) -> torch.Tensor:
        if labels is not None:
            labels = labels_of(op, labels, x, self.num_elements)
            if labels.dtype != torch.int64:
                labels = labels.to(torch.int64)
        else:
            order = order_of(op, None, order, x, self.num_elements)
            labels = _paths.labels_from(order)
        flat = [w for own in weights for w in own]
        elements = None
        if labels.is_cpu and not traced() and any(map(_requires_grad, flat)):
            # Only the weights of elements that are present are mixed; frozen ones are, of all, once.
            elements, labels = _paths.renumbered(labels, self.num_elements)
            order = None
        w = self._kept.get(flat, "fused", lambda: coefficients(weights, self._tables("mixtures"), elements))
        self._kept.watch(self._places)
        permutation, sizes = (None, None) if order is None else order[:2]
        whole = x.dim() == 3
        places = self.places_whole if whole else self.places
        name = _choice.pinned()
        tables = self.heads, self.pairs, self.last, self.factors, self.entries, self.entry_ends, places
        polynomial = Polynomial(labels, permutation, sizes, *tables, self._fingerprint, name)
        return evaluated(x.flatten(1) if whole else x, w, polynomial)

    def _grouped(
        self, op: str, x: torch.Tensor, weights: list[list[nn.Parameter]], order: GroupOrder
    ) -> torch.Tensor:
        elements = present(order)
        if elements is not None:
            order = order._replace(group_sizes=order.group_sizes.index_select(0, elements))

        def make() -> torch.Tensor:
            found = coefficients(weights, self._tables("coefficients"), elements)
            return _grouped.matrices(found, self.matrix_places, self._width)

        detail = ("grouped", None if elements is None else tuple(elements.tolist()))
        v = self._kept.get([w for own in weights for w in own], detail, make)
        features = _grouped.features(x, self.irreps_in, self.layout_in)
        y = _grouped.contract(features, order, v, self.pair_factors, self._pair_counts)
        return _grouped.columns(y, self.irreps_out, self.layout_out)

    def _check_shape(self, op: str, x: torch.Tensor) -> None:
        channels, width = self.num_features, self._width
        if x.dim() == 3 and self.layout_in == "mul_ir" and tuple(x.shape[1:]) == (channels, width):
            return
        if x.dim() != 2 or x.shape[1] != channels * width:
            raise ShapeError(
                f"{op}: x must have shape [N, {channels}, {width}] (mul_ir) or [N, {channels * width}], "
                f"got {list(x.shape)}."
            )

    def extra_repr(self) -> str:
        return (
            f"{self.irreps_in} -> {self.irreps_out}, correlation={list(self.setting.correlation)}, "
            f"num_elements={self.num_elements}"
        )

    # --- the same contraction in other packages ---------------------------------------------------------

    @classmethod
    def from_mace(cls, module: Any, implementation: str | None = None) -> SymmetricContraction:
        """From MACE's or OpenEquivariance's ``SymmetricContraction``; the weights are copied.

        Which basis the weights are of is read from its couplings. Raises ``OptionError`` where they are
        neither all paths nor, with cuequivariance installed, the independent ones.
        """
        contractions = list(module.contractions)
        first = contractions[0].weights_max
        irreps_out = Irreps(module.irreps_out)
        degrees = dict(zip(map(str, irreps_out), (int(c.correlation) for c in contractions), strict=True))
        settings: dict[str, Any] = {
            "num_elements": first.shape[0],
            "implementation": implementation,
            "device": first.device,
            "dtype": first.dtype,
        }
        errors = []
        for reduced in (False, True):
            try:
                made = cls(module.irreps_in, irreps_out, _ByText(degrees), use_reduced_cg=reduced, **settings)
            except OptionError as error:
                errors.append(str(error))
                continue
            state = {name: value for name, value in module.state_dict().items() if "graph_opt" not in name}
            try:
                made.load_state_dict(state)
            except RuntimeError as error:
                errors.append(str(error))
                continue
            for mine, theirs in zip(made._weights(), contractions, strict=True):
                for a, b in zip(mine, [theirs.weights_max, *theirs.weights], strict=True):
                    a.requires_grad_(b.requires_grad)
            return made.train(module.training)
        raise OptionError("SymmetricContraction.from_mace: " + " Nor with reduced couplings: ".join(errors))

    @torch.no_grad()
    def copy_to_mace(self, module: Any) -> None:
        """Write the weights into MACE's or OpenEquivariance's module of the same arguments."""
        for mine, theirs in zip(self._weights(), module.contractions, strict=True):
            for a, b in zip(mine, [theirs.weights_max, *theirs.weights], strict=True):
                if a.shape != b.shape:
                    raise OptionError(
                        f"SymmetricContraction: weights {list(a.shape)} do not fit {list(b.shape)} of the "
                        f"module; is use_reduced_cg={self.use_reduced_cg} the same there?"
                    )
                b.copy_(a)

    @torch.no_grad()
    def with_basis(self, use_reduced_cg: bool) -> SymmetricContraction:
        """The same map with weights of the other basis: all paths, or the independent couplings."""
        weights = self._like()
        made = SymmetricContraction(
            self.irreps_in,
            self.irreps_out,
            _ByText(dict(zip(map(str, self.irreps_out), self.setting.correlation, strict=True))),
            use_reduced_cg=use_reduced_cg,
            num_elements=self.num_elements,
            layout_in=self.layout_in,
            layout_out=self.layout_out,
            implementation=self.implementation,
            device=weights.device,
            dtype=weights.dtype,
        )
        for which, (mine, own) in enumerate(zip(self._weights(), made._weights(), strict=True)):
            for nu, a, b in zip(range(len(mine), 0, -1), mine, own, strict=True):
                b.copy_(projection(self.setting, made.setting, which, nu).to(a) @ a)
                b.requires_grad_(a.requires_grad and b.requires_grad)
        return made.train(self.training)


class _ByText(dict[Any, int]):
    """Degrees by the text of an irreps block."""

    def __getitem__(self, key: Any) -> int:
        return super().__getitem__(str(key))
