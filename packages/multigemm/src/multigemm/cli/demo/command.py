"""``multigemm demo``: run the parts, print and draw what came out; the exit code tells if it is right."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._support import require
from . import digits, molecules, plot
from .compare import Part

METHOD = (
    "Times: medians of samples taken in turns. Memory: the peak of what PyTorch's allocator hands out "
    "during the call, from the profiler's record; operands made before it do not count."
)


def run(*, moe: bool, atoms: bool, out: Path, seed: int, threads: int) -> int:
    """0 where the accuracy is reached and all values agree, else 1."""
    console = Console()
    if moe:
        require("sklearn", "demo", "multigemm demo")
    if atoms:
        require("ase", "demo", "multigemm demo")
    require("matplotlib", "demo", "multigemm demo")
    # One thread by default: the products are small, and times repeat better on a machine with other work.
    torch.set_num_threads(threads)
    start = time.perf_counter()
    parts: list[Part] = []
    curve = None
    if moe:
        config = digits.Config(seed=seed)
        with console.status("training a mixture of experts on handwritten digits"):
            part, curve = digits.run(config)
        parts.append(part)
    if atoms:
        with console.status("differentiating an energy of molecules"):
            parts.append(molecules.run(molecules.Config(seed=seed)))
    for part in parts:
        show(console, part)
    image = out / "multigemm-demo.png"
    plot.draw(curve, parts, image)
    console.print(METHOD, highlight=False)
    console.print(
        f"plot: {image}   threads: {threads}   whole demo: {time.perf_counter() - start:.0f} s",
        highlight=False,
    )
    return 1 if any(part.faults for part in parts) else 0


def show(console: Console, part: Part) -> None:
    """The facts, the differences and the costs of one part."""
    console.rule(f"[bold]{part.title}")
    for name, text in part.facts.items():
        console.print(f"{name}: {escape(text)}", highlight=False)
    values = Table("quantity", f"largest relative difference from {part.other}", "allowed", "")
    for a in part.agreements:
        mark = "[green]equal[/]" if a.holds else "[red]DIFFERS[/]"
        values.add_row(a.quantity, f"{a.difference:.1e}", f"{a.tolerance:.0e}", mark)
    console.print(values)
    table = Table("what", "", "grouped", part.other.removeprefix("the "), "ratio")
    for c in part.costs:
        ratio = c.other_ms / c.grouped_ms
        table.add_row(c.what, "time", f"{c.grouped_ms:.2f} ms", f"{c.other_ms:.2f} ms", f"{ratio:.2f}")
        ratio = c.other_bytes / max(c.grouped_bytes, 1)
        sizes = (f"{b / 1e6:.2f} MB" for b in (c.grouped_bytes, c.other_bytes))
        table.add_row("", "peak memory", *sizes, f"{ratio:.2f}")
    console.print(table)
    for fault in part.faults:
        console.print(f"[red]WRONG[/] {escape(fault)}", highlight=False)
