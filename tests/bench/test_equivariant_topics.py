"""The topics of equivariant layers: what is drawn, checked, foreseen and written. No test looks at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multigemm.cli.bench import command, contractions, equivariant, linears, report, results, sides, timing

CPU = torch.device("cpu")
TINY = sides.Model("tiny", 5, 3, ("0e", "1o"))
ATOMS = sides.Atoms(30, "few")
TOPICS = {"symmetric_contraction": contractions, "indexed_linear": linears}


@pytest.fixture(params=TOPICS)
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One model of few channels, two sets of atoms, one thread; what the machine can do is not measured."""
    found = sides.Data((TINY,), ("0e", "1o", "2e"), (20, 40), 3)
    monkeypatch.setattr(sides, "data", lambda: found)
    monkeypatch.setattr(contractions, "data", lambda: found)
    monkeypatch.setattr(timing, "ceilings", lambda device, dtypes: (dict.fromkeys(dtypes, 1.0), 1.0))
    monkeypatch.setattr(timing, "keep_freed_memory", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_six_models_are_known() -> None:
    found = sides.data()
    assert len(found.models) == 6
    assert found.atoms == (100, 1000, 10000)
    assert {m.elements for m in found.models} == {10, 89}
    large = next(m for m in found.models if m.name == "mace-off23-large")
    assert large.irreps(large.outputs) == "192x0e+192x1o+192x2e"
    rows = list(equivariant.plan(command.Options()))
    assert len(rows) == 6 * 3 * 2 * 2
    assert all(w.ops == sides.OPS for w in rows)
    assert len(list(equivariant.plan(command.Options(quick=True)))) == 2


def test_what_the_options_leave_out_is_told() -> None:
    assert equivariant.left_out(command.Options()) == []
    options = command.Options(names=["mace-mp-small"], sizes=["100-few", "100-all"], ops=["forward"])
    (line,) = equivariant.left_out(options)
    assert "models mace-off23-small, mace-off23-medium" in line
    assert "atoms and elements 1000-few, 1000-all, 10000-few, 10000-all" in line
    assert "operations forward+backward x" in line
    assert "dtypes" not in line


@pytest.mark.parametrize("kind", equivariant.KINDS)
@pytest.mark.parametrize("count", [1, 20, 1000])
def test_labels(kind: str, count: int) -> None:
    labels, rare = sides.Atoms(count, kind).draw(10)
    again, _ = sides.Atoms(count, kind).draw(10)
    assert torch.equal(labels, again)
    assert labels.shape == (count,)
    assert int((labels == rare).sum()) == min(count, sides.CHECKED)
    assert len(labels.unique()) <= (3 if kind == "few" else 10)
    assert count < 1000 or len(labels.unique()) == (3 if kind == "few" else 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("op", sides.OPS)
def test_ours_and_the_loop_are_right_and_a_fault_is_seen(
    topic: str, op: str, dtype: torch.dtype, small: None
) -> None:
    p = TOPICS[topic].problem(TINY, ATOMS, dtype, CPU)
    sides.prepare(p.reference, op)
    expected = sides.evaluate(p.reference, op)
    found = {}
    made = {"ours": p.ours, **{n: make() for n, make in p.peers.items() if n.startswith("loop")}}
    if op not in sides.FROZEN:
        made.pop("loop, kept", None)  # its matrices are constants
    for name, side in made.items():
        sides.prepare(side, op)
        found[name] = sides.evaluate(side, op)
        assert sides.errors(p, side, op, found[name], expected) <= sides.TOLERANCE[dtype] / 10, name
        if name != "loop, kept":
            value, size = sides.inner(side, found[name])
            assert abs(value - sides.inner(p.ours, found["ours"])[0]) <= sides.TOLERANCE[dtype] * size
    outputs = found["ours"]
    wrong = [
        dataclasses.replace(outputs, **{name: t * 1.001})
        for name in ("y", "x", "gy")
        if (t := getattr(outputs, name)) is not None
    ]
    if outputs.w:
        absent = next(g for g in range(TINY.elements) if g not in p.labels)
        for g, change in ((p.rare, 1e-3), (absent, 1e-30)):
            changed = [w.clone() for w in outputs.w if w is not None]
            changed[-1][g] += change * changed[-1].abs().max()
            wrong.append(dataclasses.replace(outputs, w=changed))
    assert wrong
    for other in wrong:
        assert sides.errors(p, p.ours, op, other, expected) > sides.TOLERANCE[dtype]


def test_a_run_from_end_to_end(topic: str, small: None, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = command.Options(device="cpu", repeats=1, budget_s=5.0, json=path, dtypes=["float64"])
    assert equivariant.run(options, topic) == 0
    found = results.read(path)
    assert [(r.sizes, r.op) for r in found.rows] == [
        (f"{n}-{kind}", op) for n in (20, 40) for kind in ("few", "all") for op in sides.OPS
    ]
    for row in found.rows:
        assert row.peers["loop"] and row.ours_ms > 0 and row.host_us and row.host_us > 0
        assert 0 < row.rel_err < 1e-12 and row.floor_ms > 0 and row.peak_bytes
        assert set(row.peers) == {
            n for n in TOPICS[topic].PEERS if n != "loop, kept" or row.op in sides.FROZEN
        }
        missing = [name for name, time in row.peers.items() if time is None]
        where = f"{row.case} {row.sizes} {row.op} {row.dtype}"
        reasons = [r for r, places in found.notes["refused"].items() if where in places]
        assert sorted(r.partition(":")[0] for r in reasons) == sorted(missing)
    assert len(found.notes["tables"]["peak memory, MB"]) == len(found.rows)
    text = report.markdown(found)
    assert "double backward: loop / ours" in text
    assert "| tiny 40-all double backward float64 |" in text


def test_what_takes_too_long_is_foreseen(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = command.Options(device="cpu", repeats=1, budget_s=1.0)
    bench = equivariant.Bench(linears, CPU, options, [torch.float64])
    small_work, large = (equivariant.Work(TINY, sides.Atoms(n, "few"), torch.float64, ()) for n in (20, 400))
    p = linears.problem(TINY, ATOMS, torch.float64, CPU)
    bench.known["e3nn", TINY, "few", torch.float64, "forward"] = 20, 0.1
    assert bench.beyond("e3nn", small_work, p, "forward") == ""
    assert "more than the row's budget, 1 s" in bench.beyond("e3nn", large, p, "forward")
    assert bench.beyond("e3nn", large, p, "double backward") == ""
    monkeypatch.setattr(equivariant, "_free_memory", lambda: 10.0)
    assert "free memory" in bench.beyond("e3nn", small_work, p, "forward")


def test_wrong_values_are_faults_of_ours_and_exclude_a_peer(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides, "data", lambda: sides.Data((TINY,), ("0e",), (20,), 3))
    options = command.Options(
        device="cpu", repeats=1, budget_s=0.0, dtypes=["float64"], sizes=["20-few"], ops=["forward"]
    )
    right = sides.evaluate

    def wrong(side: sides.Side, op: str) -> sides.Outputs:
        found = right(side, op)
        assert found.y is not None
        return dataclasses.replace(found, y=found.y * 1.01) if side.x.shape[0] == 20 else found

    monkeypatch.setattr(sides, "evaluate", wrong)
    bench = equivariant.Bench(linears, CPU, options, [torch.float64])
    bench.measure(next(equivariant.plan(options)))
    (fault,) = bench.faults
    assert "tiny 20-few forward float64: ours differs from float64 by" in fault
    assert any(r.startswith("loop: wrong values") for r in bench.outcome.notes["refused"])
    assert bench.outcome.rows[0].peers["loop"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "5-few"], "--sizes: there is no '5-few'; there are: 100-few"),
        (["--ops", "wgrad"], "--ops: there is no 'wgrad'; there are: forward, forward+backward x"),
        (["--dtype", "bfloat16"], "in float32 and float64, not torch.bfloat16"),
        (["--cases", "mace"], "--cases: there is no 'mace'; there are: all, mace-off23-small"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], message: str, topic: str) -> None:
    from typer.testing import CliRunner

    from multigemm.cli._app import app

    done = CliRunner().invoke(app, ["bench", "--device", "cpu", "--topic", topic, *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert isinstance(done.exception, SystemExit)
