"""Calls of what surrounds the products of a layer: structs of abi_moe.h and abi_polynomial.h, operands."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from multigemm import _abi

T, E, K, H, I = 5, 4, 2, 6, 3  # noqa: E741 - the letters of abi_moe.h
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def fields(text: str) -> list[tuple[str, Any]]:
    """``p: a b, l: n`` -> fields: p pointers, l int64, i int32, d double; name*3 for an array."""
    kinds = {"p": POINTER, "l": LONG, "i": INT, "d": ctypes.c_double}
    found: list[tuple[str, Any]] = []
    for part in text.split(","):
        kind, _, names = part.strip().partition(": ")
        for name in names.split():
            stem, _, count = name.partition("*")
            found.append((stem, kinds[kind] * int(count) if count else kinds[kind]))
    return found


class Route(ctypes.Structure):
    _fields_ = fields(
        "l: struct_size tokens experts top_k, p: logits, l: logits_stride*2, p: correction expert_ids "
        "weights permutation inverse ends x, l: x_row width, p: rows grad_logits, d: scale, i: dtype x_dtype "
        "score renormalize expert_groups top_groups group_score device, p: stream host"
    )


class Rows(ctypes.Structure):
    _fields_ = fields(
        "l: struct_size tokens experts top_k width, p: from_, l: from_row, p: out, l: out_row, p: other, "
        "l: other_row, p: weights dots inverse ends, i: from_dtype out_dtype other_dtype device, "
        "p: stream host"
    )


class Activate(ctypes.Structure):
    _fields_ = fields(
        "l: struct_size tokens experts top_k width, p: h out grad grad_h weights grad_weights permutation "
        "ends, d: alpha limit, i: activation gated interleaved dtype device reserved, p: stream host"
    )


class Polynomial(ctypes.Structure):
    _fields_ = fields(
        "l: struct_size rows channels groups width components head_count pair_count term_count "
        "weight_count, p: x direction*3 w gy out, l: x_row direction_row*3 gy_row out_row w_stride*2 "
        "out_stride*2, p: labels permutation ends heads pairs last factors entries entry_ends places, "
        "l: fingerprint, i: kind directions dtype implementation device reserved, p: stream host"
    )


SIZES = {Route: 200, Rows: 152, Activate: 160, Polynomial: 344}


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float64)


def made(kind: type[ctypes.Structure], device: int, stream: int, **values: Any) -> Any:
    """A problem; tensors are given by their addresses, and kept."""
    assert ctypes.sizeof(kind) == SIZES[kind], f"{kind.__name__} is not the struct of the header"
    problem: Any = kind(struct_size=ctypes.sizeof(kind), device=device, stream=stream)
    problem.kept = values
    for name, value in values.items():
        setattr(problem, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return problem


def calls(device: int, stream: int) -> dict[str, tuple[Any, list[torch.Tensor]]]:
    """Each C function by its name: a problem, and the tensors that it writes."""
    torch.manual_seed(0)
    f64 = _abi.DTYPES["float64"]
    common = {"tokens": T, "experts": E, "top_k": K}
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [3, 1], [0, 3]])
    order = torch.argsort(ids.reshape(-1), stable=True)
    permutation, inverse = order.to(torch.int32), torch.argsort(order).to(torch.int32)
    ends = torch.bincount(ids.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
    logits, weights = torch.randn(T, E, dtype=torch.float64), torch.rand(T, K, dtype=torch.float64)
    x, slots = torch.randn(T, H, dtype=torch.float64), torch.randn(T * K, H, dtype=torch.float64)
    h, narrow = torch.randn(T * K, 2 * I, dtype=torch.float64), torch.randn(T * K, I, dtype=torch.float64)
    routing = {
        "logits": logits, "logits_stride": (LONG * 2)(E, 1), "expert_groups": 1, "top_groups": 1,
        "scale": 1.0, "dtype": f64, "x_dtype": f64, "renormalize": 1,
    }  # fmt: skip
    rows = {
        "width": H, "from_dtype": f64, "out_dtype": f64, "other_dtype": f64, "inverse": inverse, "ends": ends,
        "from_row": H, "out_row": H, "weights": weights,
    }  # fmt: skip
    gate = {
        "width": I, "h": h, "permutation": permutation, "ends": ends, "gated": 1, "dtype": f64,
        "weights": weights, "alpha": 1.0, "limit": 7.0,
    }  # fmt: skip
    outputs = {name: empty(*shape) for name, shape in {
        "weights": (T, K), "rows": (T * K, H), "grad_logits": (T, E), "spread": (T * K, H),
        "collected": (T, H), "activated": (T * K, I), "grad_h": (T * K, 2 * I), "y": (T, 2),
    }.items()}  # fmt: skip
    numbers = {
        name: torch.zeros(count, dtype=dtype)
        for name, count, dtype in (
            ("expert_ids", T * K, torch.int64), ("permutation", T * K, torch.int32),
            ("inverse", T * K, torch.int32), ("ends", E, torch.int32),
        )
    }  # fmt: skip

    def problem(kind: type[ctypes.Structure], **values: Any) -> Any:
        return made(kind, device, stream, **values)

    polynomial = {
        "rows": T, "channels": 2, "groups": E, "width": 1, "components": 1, "head_count": 1, "pair_count": 1,
        "term_count": 1, "weight_count": 1, "x": torch.randn(T, 2, dtype=torch.float64), "x_row": 2,
        "out": outputs["y"], "out_row": 2,
        "w": torch.randn(E, 1, 2, dtype=torch.float64), "w_stride": (LONG * 2)(2, 2),
        "labels": torch.arange(T) % E, "heads": torch.tensor([0, 0, 0, 1], dtype=torch.int32),
        "pairs": torch.tensor([1, 0, 1, 0], dtype=torch.int32),
        "last": torch.tensor([1, 0], dtype=torch.int32),
        "factors": torch.ones(1, dtype=torch.float64),
        "entries": torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32),
        "entry_ends": torch.ones(1, dtype=torch.int32),
        "places": torch.tensor([[0, 1], [0, 1]]), "dtype": f64,
    }  # fmt: skip
    return {
        "mg_moe_route": (
            problem(
                Route, **common, **routing, **numbers, weights=outputs["weights"], x=x, x_row=H, width=H,
                rows=outputs["rows"],
            ),
            [outputs["weights"], outputs["rows"]],
        ),
        "mg_moe_route_backward": (
            problem(
                Route, **common, **routing, expert_ids=ids, weights=weights,
                grad_logits=outputs["grad_logits"],
            ),
            [outputs["grad_logits"]],
        ),
        "mg_moe_spread": (
            problem(Rows, **common, **rows, from_=x, out=outputs["spread"]), [outputs["spread"]],
        ),
        "mg_moe_collect": (
            problem(Rows, **common, **rows, from_=slots, out=outputs["collected"]), [outputs["collected"]],
        ),
        "mg_moe_activate": (
            problem(Activate, **common, **gate, out=outputs["activated"]), [outputs["activated"]],
        ),
        "mg_moe_activate_backward": (
            problem(Activate, **common, **gate, grad=narrow, grad_h=outputs["grad_h"]), [outputs["grad_h"]],
        ),
        "mg_indexed_polynomial": (problem(Polynomial, **polynomial), [outputs["y"]]),
    }  # fmt: skip


FUNCTIONS = tuple(calls(0, 0))
