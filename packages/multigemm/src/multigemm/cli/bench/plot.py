"""Time over floor of each case, ours and peers, as an image."""

from __future__ import annotations

from pathlib import Path

from .._support import require
from .results import Results, Row

STYLES = {
    "ours": ("#1b6ca8", "o"),
    "torch": ("#d1495b", "s"),
    "triton": ("#edae49", "D"),
    "loop": ("#8d99ae", "^"),
    "loop, kept": ("#5c677d", "<"),
    "mace": ("#d1495b", "s"),
    "e3nn": ("#d1495b", "s"),
    "cuequivariance": ("#edae49", "D"),
}


def draw(results: Results, path: Path) -> None:
    """One panel for each operation and dtype; one line for each case and kind of sizes."""
    require("matplotlib", "bench", "--plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    panels: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        panels.setdefault((row.op, row.dtype), []).append(row)
    columns = min(2, len(panels))
    grid = [list(panels.items())[i : i + columns] for i in range(0, len(panels), columns)]
    # As high as the longest panel of the line needs, with room for the title and the axis.
    heights = [0.8 + 0.18 * max(len(rows) for _, rows in line) for line in grid]
    figure, axes = plt.subplots(
        len(grid),
        columns,
        figsize=(7.0 * columns, sum(heights) + 0.8),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, ((op, dtype), rows) in zip(axes.flat, panels.items(), strict=False):
        for name in ("ours", *results.peers()):
            color, marker = STYLES.get(name, ("#4f772d", "v"))
            points = [(_ratio(row, name), place) for place, row in enumerate(rows)]
            known = [(ratio, place) for ratio, place in points if ratio is not None]
            x, y = [ratio for ratio, _ in known], [place for _, place in known]
            axis.scatter(
                x, y, s=26, color=color, marker=marker, label=name, zorder=3 if name == "ours" else 2
            )
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_yticks(range(len(rows)), [f"{r.case}, {r.sizes}" for r in rows], fontsize=7)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(axis="both", linewidth=0.3, alpha=0.6)
        axis.set_title(f"{op}, {dtype}", fontsize=10)
        axis.set_xlabel("time / floor", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8)
    device = results.machine.get("gpu") or results.machine.get("name")
    figure.suptitle(f"multigemm {results.versions.get('multigemm')} on {device}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ratio(row: Row, name: str) -> float | None:
    time = row.ours_ms if name == "ours" else row.peers.get(name)
    return None if time is None else time / row.floor_ms
