"""The commands and their options; what they do stands in one folder or file each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="multigemm",
    help="Grouped matrix products for PyTorch: many matrices of different heights in one call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
) -> None:
    """Show what is installed, what was refused and why, and compute a small product everywhere."""
    from . import doctor as command

    raise typer.Exit(command.run(as_json=json))


@app.command()
def demo(
    moe: Annotated[bool, typer.Option("--moe", help="Only the mixture of experts.")] = False,
    atoms: Annotated[bool, typer.Option("--atoms", help="Only the molecules.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the plot multigemm-demo.png.")] = Path("."),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and displacements.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = 1,
) -> None:
    """Train a mixture of experts on handwritten digits and differentiate an energy of real molecules.

    Both are compared with what is written today: a loop over experts, a one-hot einsum over elements.
    The exit code is not zero where the accuracy is under 95 % or any value differs.
    """
    from .demo import command

    both = moe == atoms
    raise typer.Exit(command.run(moe=moe or both, atoms=atoms or both, out=out, seed=seed, threads=threads))


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="cpu, cuda ...; cuda where there is one.")] = None,
    cases: Annotated[
        str, typer.Option(help="Names of cases, groups, layers or models, separated by commas.")
    ] = "all",
    sizes: Annotated[
        str | None,
        typer.Option(
            help="even, random, skew; for equivariant layers 100-few, 100-all ... 10000-all; all by default."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 ..., separated by commas; the group's own by default."),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            help="forward, wgrad, backward, separated by commas, the first two by default; for equivariant "
            "layers forward, forward+backward x, forward+backward, double backward."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples per call, of which the median counts.")] = 9,
    budget: Annotated[
        float, typer.Option(min=0.0, help="Seconds of samples per row, at least 3 samples.")
    ] = 6.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time over floor into this image.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One case of each group, random sizes.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = None,
    graph: Annotated[
        bool, typer.Option(help="On a GPU, time graph replay where a call can be captured.")
    ] = True,
    implementation: Annotated[str | None, typer.Option(help="Pin the implementation, as use() does.")] = None,
    topic: Annotated[
        str,
        typer.Option(
            help="grouped_mm; moe: whole layers of experts; expert_parallel: those on several GPUs; "
            "symmetric_contraction, indexed_linear: of MACE."
        ),
    ] = "grouped_mm",
    table: Annotated[
        list[Path] | None, typer.Option(help="Print the Markdown table of a results file; measures nothing.")
    ] = None,
) -> None:
    """Measure against torch's grouped_mm and a loop over groups, checked in the same run."""
    from .bench import command

    if table:
        raise typer.Exit(command.tables(table, plot))
    options = command.Options(
        device=device,
        names=cases.split(","),
        sizes=sizes.split(",") if sizes else None,
        dtypes=dtype.split(",") if dtype else None,
        ops=ops.split(",") if ops else None,
        repeats=repeats,
        budget_s=budget,
        json=json,
        plot=plot,
        quick=quick,
        threads=threads,
        graph=graph,
        implementation=implementation,
    )
    if topic == "moe":
        from .bench import layers

        raise typer.Exit(layers.run(options))
    if topic in ("symmetric_contraction", "indexed_linear"):
        from .bench import equivariant

        raise typer.Exit(equivariant.run(options, topic))
    if topic == "expert_parallel":
        from .bench import expert_parallel

        raise typer.Exit(expert_parallel.run(options))
    if topic != "grouped_mm":
        raise typer.BadParameter(
            f"there is no topic {topic!r}; there are: grouped_mm, moe, expert_parallel, "
            "symmetric_contraction, indexed_linear"
        )
    raise typer.Exit(command.run(options))
