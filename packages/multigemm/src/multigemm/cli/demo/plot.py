"""The demo's one image: the learning curve, and time and memory of both parts."""

from __future__ import annotations

from pathlib import Path

from .._support import require
from .compare import Part
from .digits import REQUIRED_ACCURACY, Curve

OURS, OTHER = "#1b6ca8", "#c8553d"


def draw(curve: Curve | None, parts: list[Part], path: Path) -> None:
    require("matplotlib", "demo", "The demo's plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FormatStrFormatter

    columns = 2 if curve is None else 3
    figure, axes = plt.subplots(1, columns, figsize=(5.2 * columns, 4.4), squeeze=False, layout="constrained")
    panels = list(axes[0])
    if curve is not None:
        left = panels.pop(0)
        (loss,) = left.plot(curve.epochs, curve.loss, color=OTHER, label="training loss")
        left.set_yscale("log")
        left.set_xlabel("epoch")
        left.set_ylabel("training loss")
        right = left.twinx()
        (hits,) = right.plot(
            curve.epochs, [100 * a for a in curve.accuracy], color=OURS, label="test accuracy"
        )
        goal = right.axhline(100 * REQUIRED_ACCURACY, color=OURS, linewidth=0.8, linestyle=":", label="95 %")
        right.set_ylabel("test accuracy, %")
        right.set_ylim(60, 101)
        left.legend(handles=[loss, hits, goal], loc="center right", fontsize=8)
        left.set_title(f"digits: {100 * curve.accuracy[-1]:.1f} % of the test images", fontsize=10)
    costs = [(part, cost) for part in parts for cost in part.costs]
    labels = [f"{cost.what.replace(', ', chr(10))}\nagainst\n{part.other}" for part, cost in costs]
    for axis, unit, scale, values in (
        (panels[0], "milliseconds", 1.0, [(c.grouped_ms, c.other_ms) for _, c in costs]),
        (panels[1], "peak memory, MB", 1e-6, [(c.grouped_bytes, c.other_bytes) for _, c in costs]),
    ):
        for shift, color, name, index in ((-0.2, OURS, "grouped", 0), (0.2, OTHER, "what it replaces", 1)):
            heights = [value[index] * scale for value in values]
            places = [i + shift for i in range(len(heights))]
            bars = axis.bar(places, heights, 0.38, color=color, label=name)
            axis.bar_label(bars, [short(h) for h in heights], fontsize=8, padding=2)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(low * 0.6, high * 3)
        axis.set_xticks(range(len(labels)), labels, fontsize=7.5)
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_title(f"{unit} (logarithmic)", fontsize=10)
        axis.legend(fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def short(value: float) -> str:
    """Three digits at most, no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
