"""Run the wheels of both CUDA majors on this machine's GPU, whatever PyTorch's is, and tell what ran.

    python3 ci/gpu_majors.py --foreign cu12 --native cu13 --site FOLDER [--out FILE.md] [STEP ...]
                             [-- PYTEST ARGUMENT ...]

The foreign wheel is of another CUDA major than this PyTorch; FOLDER holds what stands in for its cuBLAS
(made by ci/stand_in_blas.py), so its own kernels run, and what takes cuBLAS is skipped. Both wheels are in
dist/. Each step is a run of ci/gpu_tests.py; the table has a line for each, and one for each reason why tests
were skipped. Exit status 1 if a test failed or a step ran none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass
class Outcome:
    """What one step came to."""

    step: str
    what: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def steps(foreign: str, native: str, site: Path) -> dict[str, tuple[str, list[str]]]:
    """Name, what it shows, and the arguments of ci/gpu_tests.py."""
    other = ["--backend", foreign, "--any-cuda", "--site", str(site)]
    together = ["--backend", native, "--beside", foreign, "--site", str(site), "tests/gpu/test_two_majors.py"]
    return {
        "foreign-gpu": (f"the GPU suite on {foreign}", [*other, "--suite", "gpu"]),
        "foreign-ops": (
            f"operators and contract on {foreign}",
            [*other, "--suite", "ops", "--suite", "contract"],
        ),
        "native-gpu": (f"the GPU suite on {native}", ["--backend", native, "--suite", "gpu"]),
        "together": (f"{native} and {foreign} in one process", together),
    }


def read(report: Path, step: str, what: str) -> Outcome:
    """The outcome that a report of pytest tells."""
    outcome = Outcome(step, what)
    if not report.exists():
        outcome.failed.append("the run ended without a report")
        return outcome
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome.seconds += float(case.get("time", "0"))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skipped is not None:
            outcome.skipped[skipped.get("message", "")] += 1
        else:
            outcome.passed += 1
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """The outcomes in Markdown."""
    lines = ["| step | what | passed | failed | skipped | seconds |", "| --- | --- | --- | --- | --- | --- |"]
    for o in outcomes:
        lines.append(
            f"| {o.step} | {o.what} | {o.passed} | {len(o.failed)} | {o.skipped.total()} | {o.seconds:.0f} |"
        )
    lines += ["", "| step | could not run | tests |", "| --- | --- | --- |"]
    for o in outcomes:
        lines += [f"| {o.step} | {reason} | {count} |" for reason, count in o.skipped.most_common()]
    lines += [""] + [f"- {o.step} FAILED: {name}" for o in outcomes for name in o.failed]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    words, more = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="What follows -- goes to pytest."
    )
    parser.add_argument("--foreign", default="cu12", help="backend of another CUDA major than PyTorch")
    parser.add_argument("--native", default="cu13", help="backend of PyTorch's CUDA major")
    parser.add_argument("--site", type=Path, required=True, help="holds stand-ins for the foreign cuBLAS")
    parser.add_argument("--out", type=Path, help="also write the table there, after each step")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="all by default")
    options = parser.parse_args(words)
    known = steps(options.foreign, options.native, options.site.resolve())
    if unknown := sorted(set(options.steps) - set(known)):
        parser.error(f"unknown steps {', '.join(unknown)}; there are {', '.join(known)}")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.steps or known:
            what, given = known[name]
            report = Path(folder) / f"{name}.xml"
            command = [sys.executable, str(HERE / "gpu_tests.py"), *given, f"--junitxml={report}"]
            subprocess.run([*command, "-q", "-p", "no:cacheprovider", *more], check=False)
            outcomes.append(read(report, name, what))
            if options.out is not None:
                options.out.write_text(table(outcomes), encoding="utf-8")
    print(table(outcomes))
    return 1 if any(o.failed or not o.passed for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
