"""Run the suites on this machine's GPU with this `python3` and its PyTorch; nothing is installed.

    python3 ci/gpu_tests.py [--backend NAME [--wheel PATH]] [--beside NAME] [--site FOLDER] [--any-cuda]
                            [--suite FOLDER ...] [--gpus N] [--without DEFENCE] [PYTEST ARGUMENT ...]

The front is pure Python, so a path serves as its installation. A backend's wheel, of dist/ unless it is
given, is unpacked into a folder of its own; its cuBLAS or hipBLAS is the one that PyTorch brings.
Without --backend the PyTorch reference computes everything. --beside adds the wheel of another backend, for
tests of both in one process. --site names one more folder of packages, such as ci/stand_in_blas.py makes;
with it and --any-cuda a backend for another CUDA major than PyTorch's runs, but for what takes cuBLAS.

--gpus 2 runs what needs two GPUs, and nothing else; fewer are an error, not skipped tests. The backend is
that of this PyTorch, unless it is given. --without DEFENCE (guard, stream, pool-key) is the test of those
tests, on a wheel that was built without it: each test that is marked with the defence runs in a process of
its own, and has to fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("ops", "contract", "gpu")
DEFENCES = ("guard", "stream", "pool-key")
AT_ONCE, SECONDS = 12, 180
"""Processes of --without at a time, and what each may take."""


def wheel_of(name: str, given: Path | None, without: str | None = None) -> Path:
    """The one wheel to test."""
    if given is not None:
        return given
    folder = f"dist/without-{without}" if without else "dist"
    wheels = sorted((ROOT / folder).glob(f"multigemm_{name}-*.whl"))
    if len(wheels) != 1:
        names = ", ".join(wheel.name for wheel in wheels) or "none"
        raise SystemExit(
            f"{folder}/ has {names} for {name}, one wheel is needed: build it, or give --wheel PATH"
        )
    return wheels[0]


# What this python3's PyTorch was built for, and the architecture of its first GPU; "" where there is none.
ASK = """
import json, torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
name = (getattr(gpu, "gcnArchName", "") or "sm_%d%d" % (gpu.major, gpu.minor)) if gpu else ""
print(json.dumps([torch.version.hip, torch.version.cuda, name.partition(":")[0]]))
"""


def ask(python: str) -> tuple[str | None, str | None, str]:
    """What ASK tells of an interpreter's PyTorch: HIP's version, CUDA's, and the GPU's architecture."""
    asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise SystemExit(f"{python} cannot import PyTorch:\n{asked.stderr}")
    hip, cuda, gpu = json.loads(asked.stdout.splitlines()[-1])
    return hip, cuda, gpu


def own_backend(python: str) -> str:
    """The backend that fits an interpreter's PyTorch."""
    hip, cuda, _ = ask(python)
    if hip is None and cuda is None:
        raise SystemExit(f"the PyTorch of {python} is for the CPU: --gpus needs one for GPUs")
    return "rocm" if hip else f"cu{str(cuda).partition('.')[0]}"


def unfit(info: dict[str, Any], hip: str | None, cuda: str | None, gpu: str) -> str:
    """Why a wheel for AMD cannot be tested here, or nothing; PyTorch calls AMD's devices "cuda" too."""
    if info["kind"] != "rocm":
        return ""
    if hip is None:
        built = f"CUDA {cuda}" if cuda else "the CPU"
        return f"needs a PyTorch for ROCm {info['major']}, this one is for {built}"
    if int(hip.split(".")[0]) != info["major"]:
        return f"is for ROCm {info['major']}, this PyTorch for {hip}"
    if not gpu:
        return "needs a GPU that PyTorch sees: check the driver, HIP_VISIBLE_DEVICES and the group render"
    if gpu not in info["architectures"]:
        return f"has code for {', '.join(info['architectures'])}, this GPU is a {gpu}: build it for that one"
    return ""


def check_fit(folder: Path, name: str, without: str | None) -> None:
    """End with a message where the wheel that was unpacked cannot run on this machine, or is another one."""
    info = json.loads((folder / f"multigemm_{name}" / "backend.json").read_text(encoding="utf-8"))
    lacks, wanted = info.get("without", []), [without] if without else []
    if lacks != wanted:
        raise SystemExit(
            f"the wheel {name} was built without {lacks or 'nothing'}, asked is {wanted or 'nothing'}"
        )
    reason = unfit(info, *ask(sys.executable))
    if reason:
        raise SystemExit(f"the wheel {name} {reason}")


def must_fail(pytest: list[str], environment: dict[str, str], without: str, chosen: list[str]) -> int:
    """Run each test of a defence by itself; 0 if all fail, as they have to where it is missing."""
    environment = {**environment, "COLUMNS": "400"}  # room for the reasons in the summary
    pytest = [*pytest, "-q", "-p", "no:cacheprovider", *chosen]
    asked = subprocess.run(
        [*pytest, "--collect-only"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    tests = [line for line in asked.stdout.splitlines() if "::" in line and not line.startswith(" ")]
    if asked.returncode != 0 or not tests:
        print(asked.stdout, asked.stderr)
        raise SystemExit(f"no test is marked with the defence {without}")

    def outcome(test: str) -> tuple[str, str]:
        command = [*pytest[: len(pytest) - len(chosen)], test]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"failed: still running after {SECONDS} s", ""
        if done.returncode == 1:
            failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            if failures:
                return "failed: " + failures[0].partition(" - ")[2][:110], ""
            return "NOT RUN, an error before or after it", done.stdout[-2000:]
        if done.returncode < 0:
            return f"failed: ended by signal {-done.returncode}", ""
        told = "PASSED OR SKIPPED" if done.returncode == 0 else f"NOT RUN, exit status {done.returncode}"
        return told, done.stdout[-2000:] + done.stderr[-2000:]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = dict(zip(tests, pool.map(outcome, tests), strict=True))
    wrong = {test: text for test, (told, text) in outcomes.items() if not told.startswith("failed")}
    for test, (told, _) in outcomes.items():
        print(f"{test.rpartition('/')[2]}: {told}")
    for text in wrong.values():
        print(text)
    print(f"without {without}: {len(tests) - len(wrong)} of {len(tests)} tests fail, as all have to")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="native backend, whose wheel is tested; none without")
    parser.add_argument("--wheel", type=Path, help="its wheel, instead of the one in dist/")
    parser.add_argument("--beside", help="another backend, whose wheel of dist/ is there too")
    parser.add_argument("--site", type=Path, help="one more folder of packages")
    parser.add_argument(
        "--any-cuda", action="store_true", help="the backend may be of another CUDA major than PyTorch"
    )
    parser.add_argument(
        "--suite", action="append", help=f"folder of tests/: {', '.join(SUITES)}; default all"
    )
    parser.add_argument("--gpus", type=int, help="run what needs so many GPUs, and nothing else")
    parser.add_argument("--without", choices=DEFENCES, help="on a wheel without it, its tests have to fail")
    options, rest = parser.parse_known_args()
    if options.without and options.gpus is None:
        parser.error("--without is about the tests of several GPUs: give --gpus 2")
    if options.gpus is not None and options.backend is None:
        options.backend = own_backend(sys.executable)
    if options.wheel is not None and options.backend is None:
        parser.error("--wheel is a backend's, so --backend NAME has to name it")
    suites = [ROOT / "tests" / s for s in options.suite or (SUITES if options.gpus is None else ("gpu",))]
    pytest = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    # Paths are from the root; naming one replaces the suites.
    chosen = [str(ROOT / a) if (ROOT / a.split("::")[0]).exists() else a for a in rest]
    named = chosen != rest
    chosen += [] if named else [str(s) for s in suites if s.is_dir()]
    pytest += ["--device", "cuda"]
    # Tests that start processes of their own stay together; with several workers, each would start them.
    pytest += ["--dist", "loadgroup"] if any(re.match(r"-n|--numprocesses", a) for a in rest) else []
    pytest += ["--gpus", str(options.gpus)] if options.gpus is not None else []
    pytest += ["--without", options.without] if options.without else []
    environment = dict(os.environ)
    paths = [str(ROOT / "packages" / "multigemm" / "src")]
    with tempfile.TemporaryDirectory() as folder:
        if options.backend is None:
            environment["MULTIGEMM_FALLBACK"] = "torch"
        else:
            wheels = [wheel_of(options.backend, options.wheel, options.without)]
            wheels += [wheel_of(options.beside, None)] if options.beside else []
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder)
                print(f"{wheel.name}, unpacked into {folder}", flush=True)
            check_fit(Path(folder), options.backend, options.without)
            paths += [folder, *([str(options.site.resolve())] if options.site else [])]
            environment["MULTIGEMM_ANY_CUDA"] = "1" if options.any_cuda else "0"
            environment["MULTIGEMM_BACKEND"] = options.backend
            pytest += ["--backend", options.backend]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
        if options.without:
            return must_fail(pytest, environment, options.without, chosen)
        return subprocess.run([*pytest, *chosen], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
