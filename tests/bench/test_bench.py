"""``multigemm bench``: what is drawn, scaled, computed and written. No test looks at an absolute time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from multigemm.cli.bench import cases, command, floor, measure, peers, plot, report, results, timing

CPU = torch.device("cpu")
MOE = cases.Case("moe", "prefill_bf16", N=37, G=5, K=8, M=12)
ATOMS = cases.Case("atoms", "equivariant_fp32_fp64", N=37, G=5, K=4, M=6, B=3)
SIZES = [10, 0, 20, 0, 3]  # 33 of 37 rows, two groups without rows


def named(name: str) -> cases.Case:
    (case,) = (c for c in cases.all_cases() if c.name == name)
    return case


# --- cases ----------------------------------------------------------------------------------------


def test_every_shape_of_the_file_is_a_case() -> None:
    groups = {case.group for case in cases.all_cases()}
    assert groups == {"prefill_bf16", "decode_bf16", "equivariant_fp32_fp64"}
    assert len({case.name for case in cases.all_cases()}) == len(cases.all_cases()) == 34
    assert named("mixtral-up").shape() == "N=8192 G=8 K=4096 M=28672"
    assert named("one-row-each").kinds == ("even",)
    assert named("few-of-89").present == 3


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("name", ["qwen3-30b-up", "few-of-89", "mace-off-0e"])
def test_sizes_are_drawn_as_the_note_says(name: str, kind: str) -> None:
    case = named(name)
    sizes = cases.draw_sizes(case, kind)
    assert sizes == cases.draw_sizes(case, kind), "the seed is fixed"
    assert len(sizes) == case.G
    places = case.present or case.G
    assert sum(1 for n in sizes if n) <= places
    if kind == "even":
        assert {n for n in sizes if n} == {case.N // places}
        assert sum(sizes) == case.N // places * places
    else:
        assert sum(sizes) == case.N
    if kind == "random":
        mean = case.N / places
        assert all(abs(n - mean) < 6 * mean**0.5 + 1 for n in sizes if n)


def test_skew_follows_one_over_rank_in_shuffled_order() -> None:
    case = named("qwen3-30b-up")
    sizes = cases.draw_sizes(case, "skew")
    harmonic = sum(1 / rank for rank in range(1, case.G + 1))
    ranked = sorted(sizes, reverse=True)
    for rank in (1, 2, 4, 8):
        assert ranked[rank - 1] == pytest.approx(case.N / harmonic / rank, rel=0.15)
    assert sizes != ranked


def test_even_sizes_need_a_row_for_each_group() -> None:
    assert not cases.applies(named("qwen3-decode1"), "even")
    assert cases.applies(named("qwen3-decode1"), "random")
    assert cases.applies(named("few-of-89"), "even")
    assert not cases.applies(named("one-row-each"), "skew")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in cases.all_cases() if c.is_moe], ids=lambda c: c.name)
def test_the_cpu_scales_experts_down_and_a_gpu_does_not(case: cases.Case, dtype: torch.dtype) -> None:
    assert cases.scaled(case, dtype, "cuda") is case
    small = cases.scaled(case, dtype, "cpu")
    assert (small.name, small.G, small.kinds) == (case.name, case.G, case.kinds)
    for ours, full in ((small.N, case.N), (small.K, case.K), (small.M, case.M)):
        assert full % ours == 0
        assert (full // ours) & (full // ours - 1) == 0, "a power of two"
    assert small.flops() <= cases.CPU_FLOPS[dtype] or small.N // 2 < small.G
    assert small.G * small.K * small.M * 4 <= cases.CPU_WEIGHT_BYTES
    assert min(small.K, small.M) >= min(cases.CPU_MIN_WIDTH, case.K, case.M)
    if small.N < case.N:
        assert max(small.K, small.M) < 2 * cases.CPU_MIN_WIDTH, "rows go last"


def test_the_cpu_halves_only_the_rows_of_equivariant_cases() -> None:
    full = named("mace-off-0e")
    small = cases.scaled(full, torch.float32, "cpu")
    assert (small.K, small.M, small.B, small.G) == (full.K, full.M, full.B, full.G)
    assert small.N == 2500
    assert small == cases.scaled(full, torch.float64, "cpu"), "one shape for both dtypes"
    assert cases.scaled(named("small-md"), torch.float64, "cpu") == named("small-md")


def test_names_select_cases_and_groups_and_wrong_ones_are_told() -> None:
    assert [c.name for c in cases.select(["tiny-k", "small-md"])] == ["tiny-k", "small-md"]
    assert len(cases.select(["equivariant"])) == 6
    assert len(cases.select(["all"], quick=True)) == 3
    with pytest.raises(ValueError, match="no case or group 'mixtral'"):
        cases.select(["mixtral"])


# --- floor ----------------------------------------------------------------------------------------


def test_floor_counts_present_weights_and_rows_that_have_a_group() -> None:
    rows, present = 33, 3
    x, gy, y, dx = rows * 8, rows * 12, 37 * 12, 37 * 8
    assert floor.flops(MOE, SIZES, "forward") == floor.flops(MOE, SIZES, "wgrad") == 2 * rows * 8 * 12
    assert floor.flops(MOE, SIZES, "backward") == 4 * rows * 8 * 12
    assert floor.traffic(MOE, SIZES, "forward", torch.float32) == 4 * (x + present * 96 + y)
    assert floor.traffic(MOE, SIZES, "wgrad", torch.bfloat16) == 2 * (x + gy + 5 * 96)
    assert floor.traffic(MOE, SIZES, "backward", torch.float64) == 8 * (x + gy + present * 96 + dx + 5 * 96)
    assert floor.flops(ATOMS, SIZES, "forward") == 2 * rows * 3 * 4 * 6


def test_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    bound_by_flops = floor.floor_ms(MOE, SIZES, "forward", torch.float32, tflops=1e-6, tbps=1e3)
    assert bound_by_flops == pytest.approx(1e3 * 2 * 33 * 96 / 1e6)
    bound_by_bytes = floor.floor_ms(MOE, SIZES, "forward", torch.float32, tflops=1e3, tbps=1e-6)
    assert bound_by_bytes == pytest.approx(1e3 * floor.traffic(MOE, SIZES, "forward", torch.float32) / 1e6)


# --- peers and the check --------------------------------------------------------------------------


@pytest.mark.parametrize("op", floor.OPS)
@pytest.mark.parametrize("case", [MOE, ATOMS], ids=lambda c: c.name)
def test_ours_and_every_peer_are_right(case: cases.Case, op: str, poisoned: None) -> None:
    p = peers.make(case, SIZES, torch.float64, CPU)
    assert peers.check(p, op, peers.ours(p, op)(), zero_tail=True) < 1e-13
    for name, call in peers.loops(p, op).items():
        assert peers.check(p, op, call(), zero_tail=False) < 1e-13, name


@pytest.mark.parametrize("op", floor.OPS)
def test_torch_is_measured_where_it_can_and_told_where_it_refuses(op: str) -> None:
    usable = peers.torch_grouped_mm(peers.make(MOE, SIZES, torch.float32, CPU), op)
    assert callable(usable), usable
    assert peers.check(peers.make(MOE, SIZES, torch.float32, CPU), op, usable(), zero_tail=False) < 1e-5
    assert "no batch dimension" in str(
        peers.torch_grouped_mm(peers.make(ATOMS, SIZES, torch.float32, CPU), op)
    )
    assert "refuses" in str(peers.torch_grouped_mm(peers.make(MOE, SIZES, torch.float64, CPU), op))


@pytest.mark.parametrize("op", floor.OPS)
@pytest.mark.parametrize("fault", ["one value", "not a number", "tail"])
def test_the_check_notices_a_wrong_output(op: str, fault: str) -> None:
    p = peers.make(MOE, SIZES, torch.float64, CPU)
    outputs = [t.clone() for t in peers.ours(p, op)()]
    place = outputs[0][-1] if fault == "tail" and op != "wgrad" else outputs[0][0]
    place.flatten()[0] += float("nan") if fault == "not a number" else 1e-6
    assert peers.check(p, op, tuple(outputs), zero_tail=True) > 1e-8


def test_a_wrong_product_is_a_fault_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.ours

    def wrong(p: peers.Problem, op: str) -> peers.Call:
        return lambda: tuple(1.001 * t for t in right(p, op)())

    settings = measure.Settings(CPU, 1, 0.0, False, None, {torch.float64: 1.0}, 1.0)
    assert measure.measure(MOE, "random", SIZES, "forward", torch.float64, settings).faults == []
    monkeypatch.setattr(peers, "ours", wrong)
    (fault,) = measure.measure(MOE, "random", SIZES, "forward", torch.float64, settings).faults
    assert "moe, random, forward, float64: ours differs from float64 by" in fault


# --- timing, memory, results ----------------------------------------------------------------------


def test_calls_are_sampled_in_turns() -> None:
    log: list[str] = []
    # Long enough that a sample holds one call only.
    pause = time.sleep
    calls = {name: (lambda name=name: (log.append(name), pause(3e-3))) for name in "ab"}
    times = timing.side_by_side(CPU, calls, repeats=4)
    assert [timed.samples for timed in times.values()] == [4, 4]
    assert all(timed.ms >= 3 for timed in times.values())
    assert "".join(log[-8:]) == "abbaabba"


def test_a_spent_budget_leaves_three_samples() -> None:
    calls = {"a": lambda: torch.ones(4).sum()}
    assert timing.side_by_side(CPU, calls, repeats=50, budget_s=0.0)["a"].samples == timing.MIN_REPEATS


def row(**changes: object) -> results.Row:
    values: dict[str, object] = {
        "case": "tiny-k", "sizes": "even", "op": "forward", "dtype": "float32", "kernel": "k",
        "floor_ms": 1.0, "ours_ms": 2.0, "peers": {"torch": None, "loop": 6.0},
        "rel_err": 1e-7, "host_us": 1.0, "peak_bytes": 9,
    }  # fmt: skip
    return results.Row(**{**values, **changes})  # type: ignore[arg-type]


def test_summary_tells_the_geometric_mean_and_the_least() -> None:
    rows = [
        row(),
        row(case="small-md", ours_ms=1.0, peers={"torch": 12.0, "loop": 24.0}),
        row(case="mixtral-up", peers={"torch": 1.0, "loop": 4.0}),
        row(case="mixtral-up", op="wgrad", peers={"torch": None, "loop": None}),
    ]
    text = "\n".join(results.summary(rows))
    assert "forward, mixture-of-experts: best peer / ours = 0.50 (geometric mean of 1)" in text
    assert (
        "forward, small equivariant (under 2^30 FLOP): best peer / ours = 6.00 (geometric mean of 2)" in text
    )
    assert "least 3.00 (tiny-k, even, float32)" in text
    assert "wgrad" not in text


def test_a_peer_of_some_rows_has_a_column_of_its_own() -> None:
    peers_of = {"torch": 3.0, "triton": 1.5, "loop": 6.0}
    rows = [row(), row(case="mixtral-up", dtype="bfloat16", peers=peers_of)]
    found = results.Results(
        {"gpu": "G", "driver": "1.2"}, "d", "c", {"triton": "9"}, {"tflops": {}, "tbps": 1.0}, rows
    )
    assert found.peers() == ["torch", "loop", "triton"]
    assert report.columns(found)[5:] == [
        "floor",
        "ours",
        "torch",
        "loop",
        "triton",
        "best/ours",
        "ours/floor",
    ]
    assert report.cells(found, rows[0])[6:] == ["2.00", "none", "6.00", "none", "3.00", "2.00"]
    assert report.cells(found, rows[1])[6:] == ["2.00", "3.00", "6.00", "1.50", "0.75", "2.00"]
    assert "G, driver 1.2; d; commit c" in report.markdown(found)
    assert "triton 9" in report.markdown(found)


def test_triton_is_a_peer_on_gpus_only() -> None:
    assert not peers.triton_is_there(CPU)
    assert peers.triton_is_there(torch.device("cuda")) == (importlib.util.find_spec("triton") is not None)
    if importlib.util.find_spec("triton") is None:
        p = peers.make(MOE, SIZES, torch.float32, CPU)
        assert "Triton's kernel fails: No module named" in str(peers.triton_grouped_mm(p, "forward"))


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    """In a process of its own, as it changes how the C library frees memory."""
    file = tmp_path / "deep" / "r.json"
    arguments = ["--device", "cpu", "--cases", "small-md,skip-128", "--sizes", "random", "--repeats", "3"]
    arguments += ["--dtype", "float32", "--ops", "forward,wgrad,backward", "--budget", "0", "--threads", "1"]
    arguments += ["--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "multigemm", "bench", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    data = json.loads(file.read_text())
    assert set(data) == {"machine", "date", "commit", "versions", "ceilings", "rows", "notes"}
    assert {"name", "gpu", "driver"} <= set(data["machine"])
    assert data["machine"]["threads"] == 1
    assert {"torch", "cuda", "triton", "multigemm"} <= set(data["versions"])
    assert data["ceilings"]["tflops"]["float32"] > 0
    assert data["ceilings"]["tbps"] > 0
    assert [(r["case"], r["op"]) for r in data["rows"]] == [
        (case, op) for case in ("small-md", "skip-128") for op in floor.OPS
    ]
    keys = [
        "case",
        "sizes",
        "op",
        "dtype",
        "kernel",
        "floor_ms",
        "ours_ms",
        "peers",
        "rel_err",
        "host_us",
        "peak_bytes",
    ]
    for entry in data["rows"]:
        assert list(entry) == keys
        assert entry["peers"]["torch"] is None
        assert entry["peers"]["loop"] > 0
        assert 0 <= entry["rel_err"] < 1e-5
        assert min(entry["floor_ms"], entry["ours_ms"], entry["host_us"]) > 0
    forward = data["rows"][0]
    output_bytes = 200 * 96 * 256 * 4
    assert output_bytes <= forward["peak_bytes"] < 3 * output_bytes
    reasons = data["notes"]["refused"]
    assert [len(where) for where in reasons.values()] == [6]

    table = report.markdown(results.read(file))
    assert table.count("| small-md | N=200 G=4 B=96 K=16 M=256 | random |") == 3
    assert command.tables([file], None) == 0


def test_results_are_drawn_with_and_without_peers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs multigemm[bench]")
    rows = [row(), row(case="mixtral-up", op="wgrad", dtype="float64", peers={"torch": 1.0, "loop": 4.0})]
    ceilings = {"tflops": {"float32": 1.0}, "tbps": 1.0}
    found = results.Results(results.machine(CPU), results.now(), "c", results.versions(), ceilings, rows)
    for rows_drawn in (rows, rows[:1]):
        found.rows = rows_drawn
        plot.draw(found, tmp_path / "new" / "r.png")
        assert (tmp_path / "new" / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_results_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"x\.json is no results file: it lacks machine"):
        results.read(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "odd"], "--sizes: there is no 'odd'; there are: even, random, skew"),
        (["--ops", "sideways"], "--ops: there is no 'sideways'"),
        (["--dtype", "int8"], "--dtype: there is no 'int8'"),
        (["--cases", "nothing"], "there is no case or group 'nothing'"),
        (["--device", "abacus"], "--device abacus"),
        (["--cases", "one-row-each", "--sizes", "skew"], "no case has the sizes"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from multigemm.cli._app import app

    done = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert isinstance(done.exception, SystemExit)


def test_layers_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic "moe": rows of both operations, values checked, missing peers named with a reason."""
    pytest.importorskip("pydantic")
    from multigemm.cli.bench import command, layers, results, timing

    tiny = layers.Layer("tiny", 16, 8, 4, 2)
    monkeypatch.setattr(layers, "layers", lambda names, kind: ([tiny], [1, 512]))
    monkeypatch.setattr(timing, "ceilings", lambda device, dtypes: (dict.fromkeys(dtypes, 1.0), 1.0))
    path = tmp_path / "moe.json"
    options = command.Options(device="cpu", repeats=1, budget_s=0.0, json=path)
    assert layers.run(options) == 0
    found = results.read(path)
    assert [(r.case, r.sizes, r.op) for r in found.rows] == [
        ("tiny", "1", "forward"), ("tiny", "512", "forward"), ("tiny", "512", "forward+backward"),
    ]  # fmt: skip
    for row in found.rows:
        assert row.ours_ms > 0 and row.rel_err < 1e-5 and row.peak_bytes is not None
        assert set(row.peers) >= {"torch"} and row.kernel.endswith("moe")
    assert found.rows[2].floor_ms == pytest.approx(3 * found.rows[1].floor_ms, rel=1e-3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="there is no layer 'none'; there are: qwen3-30b"):
        layers.layers(["none"], "cpu")
