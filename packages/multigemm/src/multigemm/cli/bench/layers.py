"""``multigemm bench --topic moe``: whole layers of experts, router included, beside what others do.

Inference is timed as replays of a graph where it can be captured, forward and backward as eager calls. The
floor counts 6 T k H I operations against the weights of the experts that have tokens, the input and the
output; three times that for forward and backward. Values are checked against float64 on the first tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import torch
from rich.console import Console

from .. import _memory
from .._support import require, stop
from . import report, results, timing
from .command import DTYPES, Options, _device

OPS = ("forward", "forward+backward")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
CHECKED = 64
"""Tokens whose values are compared."""


@dataclass(frozen=True)
class Layer:
    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def shape(self) -> str:
        return f"H={self.hidden} I={self.intermediate} E={self.experts} k={self.top_k}"

    def floor_ms(self, tokens: int, present: int, itemsize: int, tflops: float, tbps: float) -> float:
        flops = 6 * tokens * self.top_k * self.hidden * self.intermediate
        elements = 3 * present * self.hidden * self.intermediate + 2 * tokens * self.hidden
        return 1e3 * max(flops / (tflops * 1e12), elements * itemsize / (tbps * 1e12))


def layers(names: list[str], device_type: str) -> tuple[list[Layer], list[int]]:
    """The layers of that name and the numbers of tokens; on a CPU widths are a quarter and tokens few."""
    data = json.loads(resources.files("multigemm").joinpath("data/shapes.json").read_text(encoding="utf-8"))
    known = [Layer(**entry) for entry in data["moe_layer"]["layers"]]
    for name in names:
        if name not in ("all", *(layer.name for layer in known)):
            raise ValueError(
                f"there is no layer {name!r}; there are: {', '.join(layer.name for layer in known)}"
            )
    chosen = [layer for layer in known if "all" in names or layer.name in names]
    tokens = data["moe_layer"]["tokens"]
    if device_type == "cpu":
        chosen = [
            Layer(c.name, c.hidden // 4, c.intermediate // 4, min(c.experts, 32), c.top_k) for c in chosen
        ]
        tokens = [t for t in tokens if t <= 512]
    return chosen, tokens


def composed(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer in torch's own operators: sort, gather, two of its grouped products, scatter by index."""
    product = torch.nn.functional.grouped_mm
    routing = module.route(x)
    k = routing.experts.shape[1]
    order = routing.experts.reshape(-1).argsort(stable=True)
    experts = routing.experts.reshape(-1)[order]
    bounds = torch.arange(module.config.num_experts, device=x.device)
    ends = torch.searchsorted(experts, bounds, right=True).to(torch.int32)
    gate, up = product(x[order // k], module.gate_up_proj, offs=ends).chunk(2, dim=-1)
    rows = product(torch.nn.functional.silu(gate) * up, module.down_proj, offs=ends)
    weights = routing.weights.reshape(-1, 1)[order]
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, order // k, rows * weights).to(x.dtype)


def transformers_block(module: Any, layer: Layer, implementation: str) -> Any:
    """The block of Qwen3-MoE in transformers, of the same weights. ``ImportError`` where there is none."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=layer.hidden, moe_intermediate_size=layer.intermediate, num_experts=layer.experts,
        num_experts_per_tok=layer.top_k, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config).to(module.gate_up_proj.device, module.gate_up_proj.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(module.router.weight)
        block.experts.gate_up_proj.copy_(module.gate_up_proj.mT)
        block.experts.down_proj.copy_(module.down_proj.mT)
    return block


def _forward(module: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor:
    y = module(x)
    found: torch.Tensor = y[0] if isinstance(y, tuple) else y
    return found


def _inference(module: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return _forward(module, x)

    return call


def _training(
    module: Callable[[torch.Tensor], Any],
    parameters: Sequence[torch.Tensor],
    x: torch.Tensor,
    gy: torch.Tensor,
) -> Callable[[], object]:
    leaf = x.clone().requires_grad_()

    def call() -> object:
        y = _forward(module, leaf)
        return torch.autograd.grad(y, [leaf, *parameters], gy, allow_unused=True)

    return call


def run(options: Options) -> int:
    """0; 1 where a value is wrong; a clear sentence and 2 where an option makes no sense."""
    require("pydantic", "bench", "--topic moe")
    console = Console()
    try:
        device = _device(options.device)
        chosen, counts = layers(list(options.names), device.type)
        dtypes = [DTYPES[d] for d in options.dtypes or ["float32" if device.type == "cpu" else "bfloat16"]]
    except (ValueError, KeyError) as error:
        raise stop(f"multigemm bench: {error}") from None
    tflops, tbps = timing.ceilings(device, dtypes)
    outcome = results.Results(
        machine=results.machine(device),
        date=results.now(),
        commit=results.commit(),
        versions=results.versions(),
        ceilings={"tflops": {results.dtype_name(d): rate for d, rate in tflops.items()}, "tbps": tbps},
        notes={"method": [" ".join((__doc__ or "").split())], "shapes": {}, "refused": {}},
    )
    faults: list[str] = []
    for dtype in dtypes:
        for layer in chosen:
            outcome.notes["shapes"][f"{layer.name} {results.dtype_name(dtype)}"] = layer.shape()
            _measure(layer, counts, dtype, device, options, tflops[dtype], tbps, outcome, faults)
            if options.json is not None:
                outcome.write(options.json)
    console.print(report.rich_table(outcome))
    for fault in faults:
        console.print(f"[red]WRONG[/red] {fault}", highlight=False)
    return 1 if faults else 0


def _measure(
    layer: Layer, counts: list[int], dtype: torch.dtype, device: torch.device, options: Options,
    tflops: float, tbps: float, outcome: results.Results, faults: list[str],
) -> None:  # fmt: skip
    """All numbers of tokens of one layer."""
    from ...moe import MoEConfig, MoEFeedForward, Routing, moe_feed_forward

    def refuse(peer: str, error: Exception) -> None:
        text = f"{peer}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        outcome.notes["refused"].setdefault(text[:200], []).append(layer.name)

    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=layer.hidden, intermediate_size=layer.intermediate, num_experts=layer.experts,
        top_k=layer.top_k, input_dtype=dtype,
    )  # fmt: skip
    ours = MoEFeedForward(config, implementation=options.implementation, device=device)
    modules: dict[str, Any] = {"ours": ours, "torch": partial(composed, ours)}
    parameters = {"ours": list(ours.parameters()), "torch": list(ours.parameters())}
    for name in ("grouped_mm", "eager"):
        try:
            block = transformers_block(ours, layer, name)
        except Exception as error:  # of a version that has no such block, or none at all
            refuse(f"transformers {name}", error)
        else:
            modules[f"transformers {name}"] = block
            parameters[f"transformers {name}"] = list(block.parameters())
    for tokens in counts:
        x = torch.randn(1, tokens, layer.hidden, device=device).to(dtype)
        with torch.no_grad():
            routing = ours.route(x)
            present = int(routing.experts.unique().numel())
            expected = moe_feed_forward(
                x[0, :CHECKED].double(), None, ours.gate_up_proj.double(), ours.down_proj.double(),
                config=config.model_copy(update={"input_dtype": torch.float64}),
                routing=Routing(routing.experts[:CHECKED], routing.weights[:CHECKED]),
                implementation="pytorch_multi_gemm_moe",
            )  # fmt: skip
            found = ours(x)[0, :CHECKED].double()
            off = float((found - expected).abs().max() / expected.abs().max())
        if not off <= TOLERANCE[dtype]:
            faults.append(f"{layer.name}, {tokens} tokens: ours differs from float64 by {off:.1e}")
        floor = layer.floor_ms(tokens, present, dtype.itemsize, tflops, tbps)
        for op in OPS:
            if op == "forward+backward" and tokens < 512:
                continue
            gy = torch.randn_like(x)
            calls: dict[str, Callable[[], object]] = {}
            for name, module in modules.items():
                argument = x[0] if name == "torch" else x
                if op == "forward":
                    call = _inference(module, argument)
                else:
                    call = _training(module, parameters[name], argument, gy[0] if name == "torch" else gy)
                try:
                    call()
                except Exception as error_of_peer:
                    if name == "ours":
                        raise
                    refuse(name, error_of_peer)
                else:
                    calls[name] = call
            graph = options.graph and op == "forward"
            times = timing.side_by_side(device, calls, options.repeats, options.budget_s, graph)
            outcome.rows.append(
                results.Row(
                    case=layer.name, sizes=str(tokens), op=op, dtype=results.dtype_name(dtype),
                    kernel=ours.explain().implementation, floor_ms=floor * (3 if op != "forward" else 1),
                    ours_ms=times["ours"].ms,
                    peers={n: times[n].ms if n in times else None for n in modules if n != "ours"},
                    rel_err=off, host_us=timing.host_us(device, calls["ours"], 20 if tokens > 64 else 200),
                    peak_bytes=_memory.peak_bytes(calls["ours"], device),
                )
            )  # fmt: skip
