"""Run the suites on this machine's GPU with this `python3` and its PyTorch; nothing is installed.

    python3 ci/gpu_tests.py [--backend NAME [--wheel PATH]] [--beside NAME] [--site FOLDER] [--any-cuda]
                            [--suite FOLDER ...] [PYTEST ARGUMENT ...]

The front is pure Python, so a path serves as its installation. A backend's wheel, of dist/ unless it is
given, is unpacked into a folder of its own; its cuBLAS or hipBLAS is the one that PyTorch brings.
Without --backend the PyTorch reference computes everything. --beside adds the wheel of another backend, for
tests of both in one process. --site names one more folder of packages, such as ci/stand_in_blas.py makes;
with it and --any-cuda a backend for another CUDA major than PyTorch's runs, but for what takes cuBLAS.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

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


# What this python3's PyTorch was built for, and the architecture of its first GPU; "" where there is none.
ASK = """
import json, torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
name = (getattr(gpu, "gcnArchName", "") or "sm_%d%d" % (gpu.major, gpu.minor)) if gpu else ""
print(json.dumps([torch.version.hip, torch.version.cuda, name.partition(":")[0]]))
"""


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


def check_fit(folder: Path, name: str) -> None:
    """End with a message where the wheel that was unpacked cannot run on this machine."""
    info = json.loads((folder / f"multigemm_{name}" / "backend.json").read_text(encoding="utf-8"))
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise SystemExit(f"{sys.executable} cannot import PyTorch:\n{asked.stderr}")
    reason = unfit(info, *json.loads(asked.stdout.splitlines()[-1]))
    if reason:
        raise SystemExit(f"the wheel {name} {reason}")


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
            check_fit(Path(folder), options.backend)
            paths += [folder, *([str(options.site.resolve())] if options.site else [])]
            environment["MULTIGEMM_ANY_CUDA"] = "1" if options.any_cuda else "0"
            environment["MULTIGEMM_BACKEND"] = options.backend
            pytest += ["--backend", options.backend]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
        return subprocess.run([*pytest, *chosen], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
