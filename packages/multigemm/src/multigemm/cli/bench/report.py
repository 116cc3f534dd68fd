"""Results as tables: for the terminal and as Markdown for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .results import Results, Row, summary

if TYPE_CHECKING:
    from rich.table import Table

WORDS = ("case", "shape", "sizes", "op", "dtype")
"""Columns of words; the others hold numbers."""


def columns(results: Results) -> list[str]:
    return [*WORDS, "floor", "ours", *results.peers(), "best/ours", "ours/floor"]


def shape_of(results: Results, row: Row) -> str:
    shapes = results.notes.get("shapes", {})
    return str(shapes.get(f"{row.case} {row.dtype}", ""))


def cells(results: Results, row: Row) -> list[str]:
    ratio = row.ratio()
    peers = [row.peers.get(name) for name in results.peers()]
    return [
        row.case,
        shape_of(results, row),
        row.sizes,
        row.op,
        row.dtype,
        ms(row.floor_ms),
        ms(row.ours_ms),
        *("none" if t is None else ms(t) for t in peers),
        "" if ratio is None else f"{ratio:.2f}",
        f"{row.ours_ms / row.floor_ms:.2f}" if row.floor_ms else "",
    ]


def ms(value: float) -> str:
    """Three significant digits, no exponent."""
    for bound, digits in ((100.0, 0), (10.0, 1), (1.0, 2), (0.1, 3)):
        if value >= bound:
            return f"{value:.{digits}f}"
    return f"{value:.4f}"


def rich_table(results: Results) -> Table:
    from rich.table import Table

    device = results.machine.get("gpu") or results.machine.get("name")
    table = Table(title=f"grouped products on {device}, milliseconds", title_justify="left")
    for name in columns(results):
        right = name not in WORDS
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "shape")
    for row in results.rows:
        style = None
        ratio = row.ratio()
        if ratio is not None and ratio < 0.95:
            style = "yellow"
        table.add_row(*cells(results, row), style=style)
    return table


def header(results: Results) -> list[str]:
    """What was measured where, in a few sentences."""
    machine, versions, ceilings = results.machine, results.versions, results.ceilings
    where = machine.get("gpu") or machine.get("name")
    if machine.get("threads"):
        where = f"{where}, threads: {machine['threads']}, {machine.get('instructions')}"
    if machine.get("driver"):
        where = f"{where}, driver {machine['driver']}"
    rates = ", ".join(f"{name} {rate:.4g} TFLOP/s" for name, rate in ceilings["tflops"].items())
    backends = ", ".join(f"{k} {v}" for k, v in versions.items() if k.startswith("backend")) or "no backend"
    if "triton" in results.peers():
        backends = f"{backends}, triton {versions.get('triton')}"
    return [
        f"{where}; {results.date}; commit {results.commit}; torch {versions.get('torch')}, "
        f"multigemm {versions.get('multigemm')}, {backends}.",
        f"Ceilings of the same run: {rates}; {ceilings['tbps']:.4g} TB/s.",
    ]


def markdown(results: Results) -> str:
    """The table of a results file, its summary and its notes."""
    lines = [*header(results), ""]
    lines += [f"- {line}" for line in summary(results.rows)]
    lines += ["", "Milliseconds, medians. `best/ours` over 1: faster than the best peer.", ""]
    names = columns(results)
    lines.append("| " + " | ".join(names) + " | kernel |")
    lines.append("|" + " --- |" * (len(names) + 1))
    for row in results.rows:
        lines.append("| " + " | ".join([*cells(results, row), row.kernel]) + " |")
    for title, values in results.notes.get("tables", {}).items():
        lines += table(title, values)
    refused = results.notes.get("refused", {})
    if refused:
        lines += ["", "`none`:"]
        lines += [f"- {reason} ({len(where)} rows)" for reason, where in refused.items()]
    method = results.notes.get("method", [])
    if method:
        lines += ["", *(f"- {line}" for line in method)]
    return "\n".join(lines) + "\n"


def table(title: str, values: dict[str, dict[str, float]]) -> list[str]:
    """One more table of a results file: a line for each row, a column for each implementation."""
    names = list(dict.fromkeys(name for found in values.values() for name in found))
    lines = ["", f"{title[:1].upper()}{title[1:]}:", "", "| row | " + " | ".join(names) + " |"]
    lines.append("|" + " --- |" * (len(names) + 1))
    for row, found in values.items():
        lines.append(f"| {row} | " + " | ".join(ms(found[n]) if n in found else "" for n in names) + " |")
    return lines
