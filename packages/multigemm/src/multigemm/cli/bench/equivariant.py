"""``multigemm bench --topic symmetric_contraction`` and ``--topic indexed_linear``: layers of MACE models.

Six published models, 100 to 10000 atoms of three elements or of all, four operations. Every implementation is
checked in the same run, against float64 and against each other; a peer that is wrong, that lacks its package,
whose temporaries this machine has no memory for, or whose single call would take longer than the budget of
the row is left out, with the reason in the notes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from rich.console import Console

import multigemm

from .. import _memory
from .._support import require, stop
from . import contractions, linears, plot, report, results, sides, timing
from .command import DTYPES, Options, _device
from .sides import OPS, TOLERANCE, Atoms, Model, Problem, Side

TOPICS: dict[str, ModuleType] = {"symmetric_contraction": contractions, "indexed_linear": linears}
KINDS = ("few", "all")
SAMPLES = 8.0
"""Calls of one row of the table: warming up, the first samples, and those that count."""


class Work(NamedTuple):
    model: Model
    atoms: Atoms
    dtype: torch.dtype
    ops: tuple[str, ...]


def plan(options: Options) -> Iterator[Work]:
    """Every layer, by rising numbers of atoms. ``ValueError`` for a word not known."""
    found = sides.data()
    every = [f"{n}-{kind}" for n in found.atoms for kind in KINDS]
    sizes = list(options.sizes) if options.sizes else every[:1] if options.quick else every
    for given, known, option in (
        (options.names, ("all", *(m.name for m in found.models)), "--cases"),
        (sizes, every, "--sizes"),
        (options.ops or (), OPS, "--ops"),
        (options.dtypes or (), tuple(DTYPES), "--dtype"),
    ):
        for word in given:
            if word not in known:
                raise ValueError(f"{option}: there is no {word!r}; there are: {', '.join(known)}")
    dtypes = [DTYPES[d] for d in options.dtypes or ("float32", "float64")]
    for dtype in dtypes:
        if dtype not in TOLERANCE:
            raise ValueError(f"--dtype: these layers are measured in float32 and float64, not {dtype}")
    models = [m for m in found.models if "all" in options.names or m.name in options.names]
    for model in models[:1] if options.quick else models:
        for count in found.atoms:
            for kind in KINDS:
                if f"{count}-{kind}" in sizes:
                    for dtype in dtypes:
                        yield Work(model, Atoms(count, kind), dtype, tuple(options.ops or OPS))


def run(options: Options, topic: str) -> int:
    """0; 1 where a value is wrong; a clear sentence and 2 where an option makes no sense."""
    console = Console()
    if options.plot is not None:
        require("matplotlib", "bench", "--plot")
    try:
        device = _device(options.device)
        work = list(plan(options))
    except ValueError as error:
        raise stop(f"multigemm bench: {error}") from None
    if options.threads:
        torch.set_num_threads(options.threads)
    bench = Bench(TOPICS[topic], device, options, [w.dtype for w in work])
    for w in work:
        with console.status(f"{w.model.name} {w.atoms.name()} {results.dtype_name(w.dtype)}"):
            bench.measure(w)
    outcome = bench.outcome
    outcome.versions = results.versions()
    if options.json is not None:
        outcome.write(options.json)
        console.print(f"results: {options.json}", highlight=False)
    Console(width=max(console.width, 170)).print(report.rich_table(outcome))
    for line in [*report.header(outcome), *results.summary(outcome.rows)]:
        console.print(line, highlight=False, soft_wrap=True)
    if options.plot is not None:
        plot.draw(outcome, options.plot)
    for fault in bench.faults:
        console.print(f"[red]WRONG[/red] {fault}", highlight=False)
    return 1 if bench.faults else 0


class Bench:
    """One run: what was measured, what was wrong, and how long peers take, to foresee the next call."""

    def __init__(
        self, topic: ModuleType, device: torch.device, options: Options, dtypes: list[torch.dtype]
    ) -> None:
        self.topic, self.device, self.options = topic, device, options
        kept = device.type == "cpu" and timing.keep_freed_memory()
        self.tflops, self.tbps = timing.ceilings(device, list(dict.fromkeys(dtypes)))
        self.faults: list[str] = []
        self.known: dict[tuple[Any, ...], tuple[int, float]] = {}
        lines = [*method(topic, device, kept), *left_out(options)]
        notes = {"method": lines, "shapes": {}, "refused": {}, "tables": {}}
        self.outcome = results.Results(
            machine=results.machine(device),
            date=results.now(),
            commit=results.commit(),
            versions=results.versions(),
            ceilings={
                "tflops": {results.dtype_name(d): rate for d, rate in self.tflops.items()},
                "tbps": self.tbps,
            },
            notes=notes,
        )

    def refuse(self, reason: str, where: str) -> None:
        places = self.outcome.notes["refused"].setdefault(reason[:240], [])
        if where not in places:
            places.append(where)

    def measure(self, w: Work) -> None:
        """All operations of one layer."""
        name = results.dtype_name(w.dtype)
        self.outcome.notes["shapes"][f"{w.model.name} {name}"] = w.model.shape()
        pin = multigemm.use(self.options.implementation) if self.options.implementation else nullcontext()
        with pin:
            p: Problem = self.topic.problem(w.model, w.atoms, w.dtype, self.device)
            made: dict[str, Side] = {"ours": p.ours}
            for op in w.ops:
                self.row(w, p, made, op)
                if self.options.json is not None:  # after each row, so that an interrupted run is not lost
                    self.outcome.write(self.options.json)
        del p, made
        gc.collect()

    def row(self, w: Work, p: Problem, made: dict[str, Side], op: str) -> None:
        where = f"{w.model.name} {w.atoms.name()} {op} {results.dtype_name(w.dtype)}"
        sides.prepare(p.reference, op)
        expected = sides.evaluate(p.reference, op)
        once: dict[str, float] = {}
        calls: dict[str, Callable[[], object]] = {}
        sums: dict[str, tuple[float, float]] = {}
        error = 0.0
        peers = [n for n in p.peers if n != "loop, kept" or op in sides.FROZEN]
        for name in ("ours", *peers):
            try:
                reason = "" if name == "ours" else self.beyond(name, w, p, op)
                if not reason:
                    side = self.side(name, p, made)
                    once[name], off = self.first(w, p, side, op, expected, sums, name)
                    reason = "" if name == "ours" else _wrong(off, sums, name, TOLERANCE[w.dtype])
            except Exception as failure:
                if name == "ours":
                    raise
                reason = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
                gc.collect()
            if reason:
                self.refuse(f"{name}: {reason}", where)
                once.pop(name, None)
                continue
            if name == "ours":
                error = off
                if not off <= TOLERANCE[w.dtype]:
                    self.faults.append(f"{where}: ours differs from float64 by {off:.1e}")
            calls[name] = partial(sides.evaluate, side, op)
        times = self.times(calls, once, op, where)
        peaks = {n: _memory.peak_bytes(c, self.device) for n, c in calls.items() if once[n] < self.slow()}
        self.table("peak memory, MB", where, {n: peak / 1e6 for n, peak in peaks.items()})
        flops, traffic = p.floor(op)
        self.outcome.rows.append(
            results.Row(
                case=w.model.name,
                sizes=w.atoms.name(),
                op=op,
                dtype=results.dtype_name(w.dtype),
                kernel=p.kernel,
                floor_ms=1e3 * max(flops / (self.tflops[w.dtype] * 1e12), traffic / (self.tbps * 1e12)),
                ours_ms=times["ours"],
                peers={name: times.get(name) for name in peers},
                rel_err=error,
                host_us=self.host_us(w, calls["ours"], op),
                peak_bytes=peaks.get("ours"),
            )
        )

    def side(self, name: str, p: Problem, made: dict[str, Side]) -> Side:
        if name not in made:
            made[name] = p.peers[name]()
        return made[name]

    def beyond(self, name: str, w: Work, p: Problem, op: str) -> str:
        """Why a peer is not even tried."""
        needed = p.temporaries(name, op)
        if self.device.type == "cpu" and needed > _free_memory() / 2:
            return "its temporaries would take more than half of this machine's free memory"
        before = self.known.get((name, w.model, w.atoms.kind, w.dtype, op))
        if before is not None and before[1] * w.atoms.count / before[0] > self.options.budget_s:
            return f"a call would take more than the row's budget, {self.options.budget_s:g} s"
        return ""

    def first(
        self, w: Work, p: Problem, side: Side, op: str, expected: sides.Outputs,
        sums: dict[str, tuple[float, float]], name: str,
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of a call, and its largest error; of two calls, where they are short or a GPU's."""
        sides.prepare(side, op)
        seconds = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            found = sides.evaluate(side, op)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            seconds = min(seconds, time.perf_counter() - start)
            if seconds > self.options.budget_s and self.device.type == "cpu":
                break  # on a GPU the first of a peer's calls may compile
        self.known[name, w.model, w.atoms.kind, w.dtype, op] = w.atoms.count, seconds
        sums[name] = sides.inner(side, found)
        return seconds, sides.errors(p, side, op, found, expected)

    def slow(self) -> float:
        """Seconds from which on a call is not repeated."""
        return self.options.budget_s / SAMPLES

    def times(
        self, calls: dict[str, Callable[[], object]], once: dict[str, float], op: str, where: str
    ) -> dict[str, float]:
        """Milliseconds of each, in turns; of slow ones those of the call that was made already."""
        quick = {n: c for n, c in calls.items() if once[n] < self.slow() or n == "ours"}
        # Autograd's backward pass is not captured: see measure.py.
        graph = self.options.graph and op == "forward"
        timed = timing.side_by_side(self.device, quick, self.options.repeats, self.options.budget_s, graph)
        found = {n: t.ms for n, t in timed.items()}
        if timed["ours"].graphed:
            self.outcome.notes.setdefault("graph replay", []).append(where)
        for name in calls.keys() - quick.keys():
            found[name] = once[name] * 1e3
            self.outcome.notes.setdefault("one sample", []).append(f"{name}: {where}")
        if self.device.type != "cpu":
            wall = timing.side_by_side(
                self.device, quick, self.options.repeats, self.options.budget_s, wall=True
            )
            self.table("wall time of eager calls, ms", where, {n: t.ms for n, t in wall.items()})
        return found

    def host_us(self, w: Work, call: Callable[[], object], op: str) -> float:
        """Host time of a call. On the CPU, where a call returns when its work is done, that of the same call
        with one atom and one channel, which has next to no work."""
        if self.device.type != "cpu":
            return timing.host_us(self.device, call, 20)
        tiny = self.topic.problem(Model("tiny", 1, 1, w.model.outputs), Atoms(1, "few"), w.dtype, self.device)
        sides.prepare(tiny.ours, op)
        return timing.host_us(self.device, partial(sides.evaluate, tiny.ours, op), 20)

    def table(self, title: str, where: str, values: dict[str, float]) -> None:
        self.outcome.notes["tables"].setdefault(title, {})[where] = values


def _wrong(off: float, sums: dict[str, tuple[float, float]], name: str, tolerance: float) -> str:
    """Why a peer's values are not ours, nor float64's."""
    if not off <= tolerance:
        return f"wrong values: differs from float64 by {off:.1e}"
    apart = abs(sums[name][0] - sums["ours"][0]) / (sums["ours"][1] or 1.0)
    return "" if apart <= tolerance else f"wrong gradients of weights: differ from ours by {apart:.1e}"


def _free_memory() -> float:
    """Bytes that programs may still take, files that are cached counted as free."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as stream:
            known = dict(line.split(":", 1) for line in stream)
        return float(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # a system that does not tell
        return float("inf")


def left_out(options: Options) -> list[str]:
    """What the options leave out of the whole plan, for the file."""
    whole = list(plan(Options()))
    chosen = list(plan(options))

    def missing(of: Callable[[Work], Any]) -> list[str]:
        kept = {of(w) for w in chosen}
        return list(dict.fromkeys(str(of(w)) for w in whole if of(w) not in kept))

    parts = {
        "models": missing(lambda w: w.model.name),
        "atoms and elements": missing(lambda w: w.atoms.name()),
        "dtypes": missing(lambda w: results.dtype_name(w.dtype)),
        "operations": [op for op in OPS if op not in chosen[0].ops],
    }
    told = [f"{name} {', '.join(words)}" for name, words in parts.items() if words]
    return [f"Left out of this run, as it was asked for: {'; '.join(told)}."] if told else []


def method(topic: ModuleType, device: torch.device, kept: bool) -> list[str]:
    """How the numbers were made, for whoever reads the file without this program."""
    lines = [
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
        *(" ".join(line.split()) for line in (topic.__doc__ or "").partition("\n- ")[2].split("\n- ")),
        "Each operation starts from x. forward and forward+backward x: frozen weights, whose coefficients "
        "the library keeps. forward+backward: gradients of x and all weights. double backward: the gradient "
        "of x, then gradients of its product with a direction in x, in the cotangent and in all weights.",
        "rel_err: largest difference from a float64 product of dense couplings or matrices over its largest "
        "value: of values and gradients of 16 atoms, all atoms of the rarest element, and of its weights. "
        "The sum of gradient times weight over all weights has to be that of ours for every peer.",
        "floor_ms = max(FLOPs / F, bytes / W). " + " ".join((topic._floor.__doc__ or "").split()),
        "peak memory: what one call allocates through PyTorch at its peak, its outputs included.",
    ]
    if device.type == "cpu":
        lines.append("host_us: the same call with one atom and one channel.")
    else:
        lines.append(
            "Times are device times between events, queued behind a busy device, of the forward pass as "
            "replays of a CUDA graph where it can be captured; wall times are those of eager calls until the "
            "device is done."
        )
    if kept:
        lines.append(
            "The C library keeps freed memory (mallopt), so that page faults of new outputs do not count."
        )
    return lines
