"""``multigemm bench --topic expert_parallel``: a layer whose experts are spread over processes, one a GPU.

- ours: ``expert_parallel`` of the layer, each process with tokens of its own; the slowest process counts.
- one process: the same layer with all experts, on one GPU, for the tokens of all processes.
- exchanges alone: the same rows sent there and back, and nothing else; the limit that the links set.

Sizes are tokens of each process. Experts are drawn evenly ("random") or with probability 1 / rank ("skew"),
the rank in a shuffled order. The floor is the larger of two: what the process with the most rows computes,
6 rows H I operations against its weights and rows; and what the busiest process sends, over the rate of an
even exchange of 64 MiB, measured in the same run. Forward and backward: three times the first, twice the
second.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from .. import _memory
from .._support import require, stop
from . import report, results, timing
from .command import DTYPES, Options, _device
from .layers import OPS, TOLERANCE, Layer, layers

KINDS = ("random", "skew")
CHUNKS = (1, 4)
TOKENS = (64, 1024, 8192)
"""Of each process on a GPU; the first alone on a CPU."""
CHECKED = 64
"""Tokens whose values are compared with float64."""
LIMIT_S = 900.0
"""After which the processes are given up."""


def run(options: Options) -> int:
    """0; 1 where a value is wrong or a process failed; a clear sentence and 2 for an unknown word."""
    require("pydantic", "bench", "--topic expert_parallel")
    console = Console()
    try:
        device = _device(options.device)
        layers(list(options.names), device.type)
        if not kinds_of(options):
            words = ", ".join(options.sizes or ())
            raise ValueError(f"--sizes: this topic has {', '.join(KINDS)}, got {words}")
        world = processes(device)
    except ValueError as error:
        raise stop(f"multigemm bench: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        given = replace(options, json=None, plot=None)
        started = [
            context.Process(target=_process, args=(rank, world, device.type, folder, given))
            for rank in range(world)
        ]
        for process in started:
            process.start()
        end = time.monotonic() + LIMIT_S
        # The first that fails leaves the others waiting in an exchange.
        while any(p.is_alive() for p in started) and not any(p.exitcode for p in started):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        failed = [rank for rank, p in enumerate(started) if p.exitcode != 0]
        for process in started:
            process.kill()
            process.join()
        if failed:
            console.print(f"[red]FAILED[/red] processes {failed}", highlight=False)
            return 1
        told = json.loads(Path(folder, "told.json").read_text(encoding="utf-8"))
        outcome = results.read(Path(folder, "results.json"))
    Console(width=max(console.width, 150)).print(report.rich_table(outcome))
    for title, values in outcome.notes["tables"].items():
        console.print("\n".join(report.table(title, values)), highlight=False)
    if options.json is not None:
        outcome.write(options.json)
        console.print(f"results: {options.json}", highlight=False)
    for fault in told:
        console.print(f"[red]WRONG[/red] {fault}", highlight=False)
    return 1 if told else 0


def kinds_of(options: Options) -> list[str]:
    return [kind for kind in KINDS if options.sizes is None or kind in options.sizes]


def processes(device: torch.device) -> int:
    """One for each visible GPU, two on the CPU. ``ValueError`` where there are fewer than two."""
    if not dist.is_available():
        raise ValueError("this PyTorch has no torch.distributed")
    if device.type == "cpu":
        return 2
    count = torch.accelerator.device_count()
    if count < 2:
        raise ValueError(f"--topic expert_parallel takes two GPUs, {count} visible; --device cpu takes none")
    return count


def _process(rank: int, world: int, kind: str, folder: str, options: Options) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    more: dict[str, Any] = {}
    if kind == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // world))
    else:
        torch.accelerator.set_device_index(rank)
        more["device_id"] = device
    dist.init_process_group(
        init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=world,
        backend={"cpu": "gloo", "cuda": "nccl"}.get(kind), timeout=datetime.timedelta(seconds=300), **more,
    )  # fmt: skip
    bench = Bench(device, options)
    bench.everything()
    if rank == 0:
        bench.outcome.write(Path(folder, "results.json"))
        Path(folder, "told.json").write_text(json.dumps(bench.faults), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class Clock:
    """Times that all processes agree on: the slowest counts, and all make the same number of calls."""

    def __init__(self, device: torch.device, repeats: int, budget_s: float) -> None:
        self.device, self.repeats, self.budget_s = device, repeats, budget_s

    def _most(self, value: float) -> float:
        agreed = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return float(agreed)

    def _seconds(self, call: Callable[[], object], count: int) -> float:
        """Of one call, from a common start to the end of the slowest process's work."""
        self._most(0.0)  # all are here
        if self.device.type == "cpu":
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return self._most((time.perf_counter() - begin) / count)
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return self._most(float(start.elapsed_time(end)) * 1e-3 / count)

    def ms(self, call: Callable[[], object]) -> float:
        """The median, of so many samples as the budget allows, 3 at least."""
        for _ in range(2):
            call()
        once = min(self._seconds(call, 1) for _ in range(2))
        count = max(1, min(200, int(timing.SAMPLE_S / max(once, 1e-6))))
        samples = max(3, min(self.repeats, int(self.budget_s / max(once * count, 1e-6))))
        return statistics.median(self._seconds(call, count) for _ in range(samples)) * 1e3


class Bench:
    """The measurements of one process; every process makes the same ones."""

    def __init__(self, device: torch.device, options: Options) -> None:
        self.device, self.options = device, options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.clock = Clock(device, options.repeats, options.budget_s / 4)
        names = options.dtypes or ["float32" if device.type == "cpu" else "bfloat16"]
        self.dtypes = [DTYPES[name] for name in names]
        self.layers, _ = layers(list(options.names), device.type)
        if options.quick:
            self.layers = self.layers[:1]
        self.tokens = TOKENS[:1] if device.type == "cpu" or options.quick else TOKENS
        self.tflops, self.tbps = timing.ceilings(device, self.dtypes)
        self.exchange_tbps = self._exchange_rate()
        self.faults: list[str] = []
        links = {"exchange_tbps": self.exchange_tbps, "processes": self.world}
        flops = {results.dtype_name(d): rate for d, rate in self.tflops.items()}
        self.outcome = results.Results(
            machine=results.machine(device), date=results.now(), commit=results.commit(),
            versions=results.versions(), ceilings={"tflops": flops, "tbps": self.tbps, **links},
            notes={"method": _method(), "shapes": {}, "refused": {}, "tables": {}},
        )  # fmt: skip

    def _exchange_rate(self) -> float:
        """TB/s that leave one process in an even exchange of large pieces; its own piece does not travel."""
        size = 2**26 if self.device.type != "cpu" else 2**22
        sent = torch.ones(self.world * size, dtype=torch.uint8, device=self.device)
        arrived = torch.empty_like(sent)
        seconds = self.clock.ms(lambda: dist.all_to_all_single(arrived, sent)) * 1e-3
        return (self.world - 1) * size / seconds * 1e-12

    def everything(self) -> None:
        kinds = kinds_of(self.options)
        for dtype in self.dtypes:
            for layer in self.layers:
                name = f"{layer.name} {results.dtype_name(dtype)}"
                self.outcome.notes["shapes"][name] = f"{layer.shape()} on {self.world} processes"
                self._layer(layer, dtype, kinds)

    def _layer(self, layer: Layer, dtype: torch.dtype, kinds: Sequence[str]) -> None:
        from ...moe import MoEConfig, MoEFeedForward, expert_parallel

        torch.manual_seed(0)  # the same layer in all processes
        config = MoEConfig(
            hidden_size=layer.hidden, intermediate_size=layer.intermediate, num_experts=layer.experts,
            top_k=layer.top_k, input_dtype=dtype,
        )  # fmt: skip
        whole = MoEFeedForward(config, implementation=self.options.implementation, device=self.device)
        spread = {chunks: expert_parallel(whole, chunks=chunks) for chunks in CHUNKS}
        for tokens in self.tokens:
            for kind in kinds:
                self._case(layer, dtype, whole, spread, tokens, kind)

    def _case(
        self, layer: Layer, dtype: torch.dtype, whole: Any, spread: dict[int, Any], tokens: int, kind: str
    ) -> None:
        from ...moe import Routing

        x, experts = draw(layer, tokens * self.world, kind, dtype, self.device)
        weights = torch.full(experts.shape, 1 / layer.top_k, device=self.device)
        mine = slice(self.rank * tokens, (self.rank + 1) * tokens)
        routing, own = Routing(experts, weights), Routing(experts[mine], weights[mine])
        counts = torch.bincount(experts.reshape(-1), minlength=layer.experts).tolist()
        shares = [spread[CHUNKS[0]]._counts, [0] * self.world]  # experts, and rows, of each process
        at = 0
        for r, size in enumerate(shares[0]):
            shares[1][r], at = sum(counts[at : at + size]), at + size
        error = self._off(layer, whole, spread, x, own, mine)
        for op in OPS:
            if op != "forward" and tokens < 512 and self.device.type != "cpu":
                continue
            case = f"{layer.name}, {tokens} each, {kind}, {op}, {results.dtype_name(dtype)}"
            exchanges = self._exchanges(layer, dtype, own.experts, shares[0], 2 if op == "forward" else 4)
            alone = self.clock.ms(exchanges)
            one = self.clock.ms(_call(whole, x, routing, op))
            floor = self._floor(layer, dtype, shares, own.experts, op)
            for chunks, module in spread.items():
                call = _call(module, x[mine], own, op)
                taken = self.clock.ms(call)
                self.outcome.rows.append(
                    results.Row(
                        case=layer.name, sizes=f"{self.world} x {tokens} {kind}", op=op,
                        dtype=results.dtype_name(dtype), floor_ms=floor, ours_ms=taken,
                        kernel=f"{module.explain().implementation}, chunks={chunks}",
                        peers={"one process": one}, rel_err=error, host_us=None,
                        peak_bytes=_memory.peak_bytes(call, self.device),
                    )
                )  # fmt: skip
                table = self.outcome.notes["tables"].setdefault(
                    "Milliseconds with the limit of the links", {}
                )
                table.setdefault(case, {"exchanges alone": alone, "one process": one})
                table[case][f"ours, chunks={chunks}"] = taken

    def _off(
        self, layer: Layer, whole: Any, spread: dict[int, Any], x: torch.Tensor, own: Any, mine: slice
    ) -> float:
        """The largest relative difference from float64, of any process and number of chunks."""
        from ...moe import Routing, moe_feed_forward

        first = slice(0, CHECKED)
        with torch.no_grad():
            expected = moe_feed_forward(
                x[mine][first].double(), None, whole.gate_up_proj.double(), whole.down_proj.double(),
                config=whole.config.model_copy(update={"input_dtype": torch.float64}),
                routing=Routing(own.experts[first], own.weights[first]),
                implementation="pytorch_multi_gemm_moe",
            )  # fmt: skip
        worst = 0.0
        for chunks, module in spread.items():
            with torch.no_grad():
                found = module(x[mine], own)[first].double()
            off = self.clock._most(float((found - expected).abs().max() / expected.abs().max()))
            if not off <= TOLERANCE[x.dtype]:
                self.faults.append(f"{layer.name}, chunks={chunks}: ours differs from float64 by {off:.1e}")
            worst = max(worst, off)
        return worst

    def _exchanges(
        self, layer: Layer, dtype: torch.dtype, experts: torch.Tensor, parts: list[int], times: int
    ) -> Callable[[], object]:
        """The rows of ours, there and back, ``times`` exchanges in all."""
        there = self._splits(experts, parts)
        received = torch.tensor(there, device=self.device)
        dist.all_to_all_single(received, torch.tensor(there, device=self.device))
        back = received.tolist()
        rows = torch.ones(sum(there), layer.hidden, dtype=dtype, device=self.device)
        arrived = torch.empty(sum(back), layer.hidden, dtype=dtype, device=self.device)

        def call() -> None:
            for _ in range(times // 2):
                dist.all_to_all_single(arrived, rows, back, there)
                dist.all_to_all_single(rows, arrived, there, back)

        return call

    def _splits(self, experts: torch.Tensor, parts: list[int]) -> list[int]:
        """Rows of this process's tokens for each process."""
        ends = torch.tensor(parts, device=experts.device).cumsum(0)
        owner = torch.bucketize(experts.reshape(-1), ends, right=True)
        return [int(n) for n in torch.bincount(owner, minlength=self.world)]

    def _floor(
        self, layer: Layer, dtype: torch.dtype, shares: list[list[int]], experts: torch.Tensor, op: str
    ) -> float:
        times, size = (1, 2) if op == "forward" else (3, 4), dtype.itemsize
        computing = 0.0
        for held, rows in zip(*shares, strict=True):
            flops = 6 * rows * layer.hidden * layer.intermediate
            elements = 3 * min(held, rows) * layer.hidden * layer.intermediate + 2 * rows * layer.hidden
            seconds = max(flops / (self.tflops[dtype] * 1e12), elements * size / (self.tbps * 1e12))
            computing = max(computing, seconds)
        splits = self._splits(experts, shares[0])
        sent = sum(splits) - splits[self.rank]
        travelling = self.clock._most(sent * layer.hidden * size / (self.exchange_tbps * 1e12))
        return 1e3 * max(times[0] * computing, times[1] * travelling)


def draw(
    layer: Layer, tokens: int, kind: str, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, H] and distinct experts [tokens, k]: the same in all processes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, layer.hidden, generator=generator).to(device, dtype)
    chances = torch.ones(layer.experts)
    if kind == "skew":
        ranks = torch.randperm(layer.experts, generator=generator) + 1
        chances = 1 / ranks.float()
    experts = torch.multinomial(chances.expand(tokens, -1), layer.top_k, generator=generator)
    return x, experts.to(device)


def _call(module: Any, x: torch.Tensor, routing: Any, op: str) -> Callable[[], object]:
    if op == "forward":

        def inference() -> object:
            with torch.no_grad():
                return module(x, routing)

        return inference
    leaf, gy = x.clone().requires_grad_(), torch.randn_like(x)
    parameters = [leaf, module.gate_up_proj, module.down_proj]
    return lambda: torch.autograd.grad(module(leaf, routing), parameters, gy)


def _method() -> list[str]:
    head, _, items = (__doc__ or "").partition("\n- ")
    *listed, rest = items.split("\n- ")
    last, _, text = rest.partition("\n\n")
    return [" ".join(part.split()) for part in (head, *listed, last, text)]
