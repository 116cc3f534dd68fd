"""``multigemm bench``: which rows to measure, in which order, and what to do with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import multigemm

from ..._errors import MultigemmError
from .._support import require, stop
from . import cases, peers, plot, report, results, timing
from .floor import OPS
from .measure import Outcome, Settings, measure

DTYPES = {results.dtype_name(d): d for d in cases.DTYPES.values()} | cases.DTYPES


@dataclass
class Options:
    device: str | None = None
    names: Sequence[str] = ("all",)
    sizes: Sequence[str] | None = None
    dtypes: Sequence[str] | None = None
    ops: Sequence[str] | None = None
    repeats: int = 9
    budget_s: float = 6.0
    json: Path | None = None
    plot: Path | None = None
    quick: bool = False
    threads: int | None = None
    graph: bool = True
    implementation: str | None = None


Work = tuple[cases.Case, str, str, torch.dtype]


def run(options: Options) -> int:
    """0; 1 where a value is wrong; a clear sentence and 2 where an option makes no sense."""
    console = Console()
    if options.plot is not None:
        require("matplotlib", "bench", "--plot")
    try:
        device = _device(options.device)
        work = list(plan(options, device.type))
    except ValueError as error:
        raise stop(f"multigemm bench: {error}") from None
    if not work:
        raise stop("multigemm bench: no case has the sizes that were asked for.")
    if options.threads:
        torch.set_num_threads(options.threads)
    outcome, faults = collect(options, device, work, console)
    Console(width=max(console.width, 150)).print(report.rich_table(outcome))
    for line in [*report.header(outcome), *results.summary(outcome.rows)]:
        console.print(line, highlight=False, soft_wrap=True)
    for reason, where in outcome.notes["refused"].items():
        console.print(f"none: {reason} ({len(where)} rows)", highlight=False)
    if options.json is not None:
        outcome.write(options.json)
        console.print(f"results: {options.json}", highlight=False)
    if options.plot is not None:
        plot.draw(outcome, options.plot)
        console.print(f"plot: {options.plot}", highlight=False)
    for fault in faults:
        console.print(f"[red]WRONG[/red] {fault}", highlight=False)
    return 1 if faults else 0


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type != "cpu" and multigemm.get_accelerator(device).device_count() == 0:
        raise ValueError(f"--device {name}: torch {torch.__version__} sees no such device")
    return device


def plan(options: Options, device_type: str) -> Iterator[Work]:
    """Every (case as it runs, kind of sizes, operation, dtype). ``ValueError`` for a word not known."""
    ops = options.ops or ("forward", "wgrad")
    sizes = options.sizes or cases.KINDS
    for given, known, option in (
        (sizes, cases.KINDS, "--sizes"),
        (ops, OPS, "--ops"),
        (options.dtypes or (), tuple(DTYPES), "--dtype"),
    ):
        for word in given:
            if word not in known:
                raise ValueError(f"{option}: there is no {word!r}; there are: {', '.join(known)}")
    kinds = ("random",) if options.quick else sizes
    for case in cases.select(options.names, quick=options.quick):
        wanted = (
            [DTYPES[d] for d in options.dtypes] if options.dtypes else cases.own_dtypes(case, device_type)
        )
        for dtype in dict.fromkeys(wanted):
            shape = cases.scaled(case, dtype, device_type)
            for op in ops:
                for kind in kinds:
                    if cases.applies(shape, kind):
                        yield shape, kind, op, dtype


def collect(
    options: Options, device: torch.device, work: Sequence[Work], console: Console
) -> tuple[results.Results, list[str]]:
    """Measure everything; the results and what is wrong with them."""
    kept = device.type == "cpu" and timing.keep_freed_memory()
    dtypes = list(dict.fromkeys(dtype for *_, dtype in work))
    tflops, tbps = timing.ceilings(device, dtypes)
    settings = Settings(
        device, options.repeats, options.budget_s, options.graph, options.implementation, tflops, tbps
    )
    outcome = results.Results(
        machine=results.machine(device),
        date=results.now(),
        commit=results.commit(),
        versions=results.versions(),
        ceilings={"tflops": {results.dtype_name(d): rate for d, rate in tflops.items()}, "tbps": tbps},
        notes={"method": method(device, kept, options.graph), "shapes": {}, "refused": {}},
    )
    faults: list[str] = []
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with progress:
        task = progress.add_task("bench", total=len(work))
        for case, kind, op, dtype in work:
            name = results.dtype_name(dtype)
            progress.update(task, description=f"{case.name} {kind} {op} {name}"[:44].ljust(44))
            outcome.notes["shapes"][f"{case.name} {name}"] = case.shape()
            try:
                found = measure(case, kind, cases.draw_sizes(case, kind), op, dtype, settings)
            except torch.OutOfMemoryError:
                _note(outcome, "not measured: out of memory", f"{case.name} {kind} {op} {name}")
            except MultigemmError as error:
                faults.append(f"{case.name}, {kind}, {op}, {name}: {error}")
            else:
                _add(outcome, found, faults)
            if options.json is not None:  # after each row, so that an interrupted run is not lost
                outcome.write(options.json)
            progress.advance(task)
    outcome.versions = results.versions()  # a backend counts as opened only now
    return outcome, faults


def _add(outcome: results.Results, found: Outcome, faults: list[str]) -> None:
    row = found.row
    outcome.rows.append(row)
    faults += found.faults
    where = f"{row.case} {row.sizes} {row.op} {row.dtype}"
    for reason in found.refused.values():
        _note(outcome, reason, where)
    if found.graphed:
        outcome.notes.setdefault("graph replay", []).append(where)


def _note(outcome: results.Results, reason: str, where: str) -> None:
    outcome.notes["refused"].setdefault(reason, []).append(where)


def method(device: torch.device, kept: bool = False, graph: bool = True) -> list[str]:
    """How the numbers were made, for whoever reads the file without this program."""
    lines = [
        "ours, torch (torch.nn.functional.grouped_mm) and loop (one mm or bmm for each group that has rows, "
        "sizes known to the host, the faster of writing into the output and copying into it) are sampled in "
        "turns in one process, after a turn that does not count; medians; each call allocates its outputs.",
        "rel_err: largest difference from a float64 reference over the largest value of the reference, in "
        "the same run; the rows of no group have to be zero.",
        "floor_ms = max(FLOPs / F, bytes / W), each input read and each output written once.",
        "backward: the gradients of x and w, the forward pass done before.",
        "peak_bytes: what one call allocates through PyTorch at its peak, its outputs included.",
    ]
    if peers.triton_is_there(device):
        lines.append(
            "triton: a persistent kernel of this benchmark's own (bf16 and fp16, no batch dimension), the "
            "fastest of a few tile shapes for each case; the ends of the groups are read on the device."
        )
    if device.type == "cuda":
        replayed = "replays of a CUDA graph of one call, where it can be captured" if graph else "eager calls"
        lines.append(
            f"Times are device times between events around {replayed}, queued behind a busy device; host_us "
            "is the time until a call returns."
        )
    if device.type == "cpu":
        lines += [
            "Shapes on the CPU: for mixtures of experts the larger of K and M is halved (not under 256), "
            "then N (not under G), until a product takes at most 2^30 FLOP (2^27 in bf16 and fp16) and the "
            "weights 256 MiB in float32; for equivariant cases N is halved until x and y take at most 1 GiB "
            "in float64.",
            "host_us: the same call with one row and one 1 x 1 matrix.",
            "A case that fits into the caches may be faster than its floor, which counts the memory bus.",
        ]
    if kept:
        lines.append(
            "The C library keeps freed memory (mallopt), so that page faults of new outputs do not count."
        )
    return lines


def tables(paths: Sequence[Path], image: Path | None) -> int:
    """Print the Markdown of results files; draw the first one where an image is asked for."""
    try:
        read = [results.read(path) for path in paths]
    except ValueError as error:
        raise stop(f"multigemm bench: {error}") from None
    for found in read:
        typer.echo(report.markdown(found))
    if image is not None:
        plot.draw(read[0], image)
    return 0
