"""Run the suites on this machine's GPU with this `python3` and its PyTorch; nothing is installed.

    python3 ci/gpu_tests.py [--backend NAME [--wheel PATH]] [--beside NAME] [--site FOLDER] [--any-cuda]
                            [--suite FOLDER ...] [PYTEST ARGUMENT ...]

The front is pure Python, so a path serves as its installation. A backend's wheel, of dist/ unless it is
given, is unpacked into a folder of its own; its cuBLAS is the one that PyTorch brings.
Without --backend the PyTorch reference computes everything. --beside adds the wheel of another backend, for
tests of both in one process. --site names one more folder of packages, such as ci/stand_in_blas.py makes;
with it and --any-cuda a backend for another CUDA major than PyTorch's runs, but for what takes cuBLAS.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("ops", "contract", "gpu")


def wheel_of(name: str, given: Path | None) -> Path:
    """The one wheel to test."""
    if given is not None:
        return given
    wheels = sorted((ROOT / "dist").glob(f"multigemm_{name}-*.whl"))
    if len(wheels) != 1:
        names = ", ".join(wheel.name for wheel in wheels) or "none"
        raise SystemExit(f"dist/ has {names} for {name}, one wheel is needed: build it, or give --wheel PATH")
    return wheels[0]


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
    options, rest = parser.parse_known_args()
    if options.wheel is not None and options.backend is None:
        parser.error("--wheel is a backend's, so --backend NAME has to name it")
    suites = [ROOT / "tests" / suite for suite in options.suite or SUITES]
    pytest = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    # Paths are from the root; naming one replaces the suites.
    chosen = [str(ROOT / a) if (ROOT / a.split("::")[0]).exists() else a for a in rest]
    named = chosen != rest
    pytest += ["--device", "cuda", *([] if named else [str(s) for s in suites if s.is_dir()])]
    environment = dict(os.environ)
    paths = [str(ROOT / "packages" / "multigemm" / "src")]
    with tempfile.TemporaryDirectory() as folder:
        if options.backend is None:
            environment["MULTIGEMM_FALLBACK"] = "torch"
        else:
            wheels = [wheel_of(options.backend, options.wheel)]
            wheels += [wheel_of(options.beside, None)] if options.beside else []
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder)
                print(f"{wheel.name}, unpacked into {folder}", flush=True)
            paths += [folder, *([str(options.site.resolve())] if options.site else [])]
            environment["MULTIGEMM_ANY_CUDA"] = "1" if options.any_cuda else "0"
            environment["MULTIGEMM_BACKEND"] = options.backend
            pytest += ["--backend", options.backend]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
        return subprocess.run([*pytest, *chosen], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
