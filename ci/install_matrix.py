"""Install the wheels of dist/ in every way that users do, each time into a clean environment.

    python ci/install_matrix.py --dist dist --torch SITE_PACKAGES --work FOLDER [CASE ...]

Each environment sees PyTorch through a path file (SITE_PACKAGES is the folder that holds it), so that no
case downloads it again; everything else is resolved and installed for real, from a local index. After each
step a program in a process of its own computes a product, checks it, and says which backend computed it;
`multigemm doctor` must find no fault and agree. What this machine lacks is named.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from install_flavours import flavour_cases
from install_kit import MATRIX, OLD, ROWS, Environment, Failed, Setting, call, fresh

Case = Callable[[Setting, str], None]


def distribution(name: str) -> str:
    return str(ROWS[name]["distribution"])


# --- extras ---------------------------------------------------------------------------------------


def front_alone(setting: Setting, case: str) -> None:
    """`pip install multigemm`: the PyTorch reference answers, without a word."""
    environment = Environment(setting, case, torch=setting.torch)
    environment.install("multigemm")
    environment.expect()
    call([str(environment.python.parent / "multigemm"), "doctor"])


def extra(name: str, setting: Setting, case: str) -> None:
    """`pip install "multigemm[cpu]"` and the others; removing the backend leaves a working front."""
    environment = Environment(setting, case, torch=setting.torch)
    environment.install(f"multigemm[{name}]")
    environment.pip("check")
    environment.expect(name)
    environment.uninstall(distribution(name))
    environment.intact("multigemm")
    if ROWS[name]["kind"] == "cpu":
        environment.expect()


def pair(one: str, other: str, setting: Setting, case: str) -> None:
    """Two backends at once; removing one, and bringing it back, leaves the other as it is."""
    environment = Environment(setting, case, torch=setting.torch)
    environment.install(f"multigemm[{one},{other}]")
    environment.intact(distribution(one))
    environment.uninstall(distribution(one))
    environment.intact(distribution(other))
    environment.expect(other)
    environment.install(f"multigemm[{one}]")
    environment.intact(distribution(other))
    environment.uninstall(distribution(other))
    environment.intact(distribution(one))


# --- upgrades -------------------------------------------------------------------------------------


def upgrade(setting: Setting, case: str) -> None:
    """From an older release with every extra to this one, by the line that a user types."""
    names = setting.backends()
    wanted = f"multigemm[{','.join(names)}]"
    environment = Environment(setting, case, torch=setting.torch)
    environment.install(f"{wanted}=={OLD}", old=True)
    environment.install("--upgrade", wanted)
    for name in ("multigemm", *map(distribution, names)):
        environment.intact(name)
        if list(environment.site.glob(f"{name.replace('-', '_')}-{OLD}.dist-info")):
            raise Failed(f"the record of {name} {OLD} is left over")
    environment.expect(*names)


def skewed_versions(setting: Setting, case: str) -> None:
    """A backend of another release is refused with a warning, and mended by the line that it gives."""
    names = setting.backends()
    environment = Environment(setting, case, torch=setting.torch)
    environment.install("multigemm")
    environment.install(*(f"{distribution(name)}=={OLD}" for name in names), old=True)
    (text,) = environment.run(SKEW)["warnings"]
    line = re.search(r"fix: python -m pip install (.+)", text)
    if f"its version is {OLD}" not in text or line is None:
        raise Failed(f"the warning does not say what is wrong, or how to mend it: {text}")
    environment.install(*shlex.split(line[1]))
    if environment.run(SKEW) != {"where": "cpu", "warnings": []}:
        raise Failed(f"the line did not mend it: {line[0]}")


SKEW = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, multigemm
    where = multigemm.explain(torch.ones(2, 3), torch.ones(1, 3, 4), [2]).implementation
texts = [str(c.message) for c in caught if c.category is RuntimeWarning]
print(json.dumps({"where": where, "warnings": texts}))
"""


# --- layouts and installers -----------------------------------------------------------------------


def target_folder(setting: Setting, case: str) -> None:
    """`pip install --target`: the front and the backend lie in a folder that only PYTHONPATH names."""
    environment = Environment(setting, case, torch=setting.torch)
    folder = fresh(setting.work / "target-folder")
    # --target looks at nothing that is installed and would bring the stand-in for PyTorch: names are given.
    environment.install("typer", "rich")
    environment.install(
        "--no-deps", "--target", str(folder), "multigemm", "multigemm-cpu", "scipy-openblas32"
    )
    environment.expect("cpu", PYTHONPATH=str(folder))


def split_folders(setting: Setting, case: str) -> None:
    """Backend in one folder, its BLAS in another, as where an administrator installed half of it."""
    environment = Environment(setting, case, torch=setting.torch)
    folder = fresh(setting.work / "split-folders")
    environment.install("multigemm", "scipy-openblas32")
    environment.install("--no-deps", "--target", str(folder), "multigemm-cpu")
    environment.expect("cpu", PYTHONPATH=str(folder))


def user_folder(setting: Setting, case: str) -> None:
    """`pip install --user`: into a folder of the user's, where the environment looks on its own."""
    base = fresh(setting.work / "user-folder")
    env = {"PYTHONUSERBASE": str(base)}
    environment = Environment(setting, case, torch=setting.torch, system=True, env=env)
    environment.install("--user", "multigemm[cpu]")
    told = environment.expect("cpu")
    if not told["file"].startswith(str(base)):
        raise Failed(f"it was installed elsewhere: {told['file']}")


def uv_installer(setting: Setting, case: str) -> None:
    """uv instead of pip, with a stand-in for PyTorch in its index, as uv does not see a path file."""
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        raise Failed(f"{uv} does not exist: python -m pip install uv")
    names = setting.backends()
    environment = Environment(setting, case, torch=setting.torch)
    env = {
        "UV_CACHE_DIR": str(setting.work / "uv-cache"),
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    pip = [str(uv), "pip"]
    place = ["--python", str(environment.python)]
    offline = ["--offline", "--no-index", "--find-links", str(setting.index)]
    call([*pip, "install", "-q", *place, *offline, f"multigemm[{','.join(names)}]"], env)
    call([*pip, "check", "-q", *place], env)
    environment.expect(*names)
    call([*pip, "uninstall", "-q", *place, "multigemm-cpu"], env)
    environment.expect(*(name for name in names if name != "cpu"))


def hostile_search_path(setting: Setting, case: str) -> None:
    """Files of the libraries' names on LD_LIBRARY_PATH, none of them a library: nothing may look there."""
    names = setting.backends()
    environment = Environment(setting, case, torch=setting.torch)
    environment.install(f"multigemm[{','.join(names)}]")
    folder = fresh(setting.work / "hostile")
    for entry in itertools.chain.from_iterable(setting.info(name)["needed"] for name in names):
        (folder / entry["soname"]).write_bytes(b"no library")
    environment.expect(*names, LD_LIBRARY_PATH=str(folder))


# --- Pythons --------------------------------------------------------------------------------------


def python(path: str, setting: Setting, case: str) -> None:
    """Another Python, without PyTorch: every backend installs, and that of the CPU computes with NumPy."""
    environment = Environment(setting, case, interpreter=path)
    names = setting.backends()
    environment.install(f"multigemm[{','.join(names)}]", "numpy")
    for name in names:
        if ROWS[name]["kind"] == "cuda":  # whose libraries are stand-ins here
            code = f"import json, {ROWS[name]['import_name']} as b; print(json.dumps(b.describe()))"
            if environment.run(code)["name"] != name:
                raise Failed(f"{name} does not say that it is {name}")
        else:
            test = Path(__file__).parent / "wheel_test.py"
            call([str(environment.python), str(test), name])


def interpreters() -> tuple[dict[str, str], list[str]]:
    """The Pythons of ci/matrix.toml that are here and work, by version, and those that are not."""
    found, missing = {}, []
    manager = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = os.environ.get("PATH", "").split(os.pathsep) + [
        str(p / "bin") for p in sorted(manager.glob("*"))
    ]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for wanted in MATRIX["python"]["test"]:
        for path in filter(None, (shutil.which(f"python{wanted}", path=place) for place in places)):
            try:
                if call([path, "-c", code]).strip() == wanted.rstrip("t"):
                    found[wanted] = path
                    break
            except Failed:  # a version manager's script without that version behind it
                continue
        else:
            missing.append(wanted)
    return found, missing


# --- running --------------------------------------------------------------------------------------


def cases(setting: Setting, pythons: dict[str, str]) -> dict[str, Case]:
    """Every case that can be run here, by name."""
    names = setting.backends()
    found: dict[str, Case] = {"front_alone": front_alone}
    if "cpu" in names:
        plain = (target_folder, split_folders, user_folder, uv_installer, hostile_search_path)
        found |= {case.__name__: case for case in (*plain, upgrade, skewed_versions)}
        found |= {f"python_{v}": functools.partial(python, path) for v, path in pythons.items()}
    found |= {f"extra_{name}": functools.partial(extra, name) for name in names}
    for one, other in itertools.combinations(names, 2):
        found[f"pair_{one}_{other}"] = functools.partial(pair, one, other)
    return found | flavour_cases(setting)


def run(name: str, case: Case, setting: Setting) -> str:
    """Run one case; return what went wrong."""
    start, trouble = time.monotonic(), ""
    try:
        case(setting, name)
    except Failed as error:
        trouble = f": {error}"
    word = "FAILED" if trouble else "ok"
    print(f"{word} {name} ({time.monotonic() - start:.0f} s){trouble}", flush=True)
    return trouble


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, required=True, help="folder of the wheels")
    parser.add_argument("--torch", type=Path, required=True, help="folder of packages that holds PyTorch")
    parser.add_argument("--work", type=Path, required=True, help="folder for the environments")
    parser.add_argument(
        "--vendor", action="append", default=[], metavar="BACKEND=FOLDER", help="packages with its libraries"
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all by default")
    options = parser.parse_args()
    vendors = {n: Path(folder) for n, _, folder in (v.partition("=") for v in options.vendor)}
    setting = Setting(options.dist.resolve(), options.torch.resolve(), options.work.resolve(), vendors)
    here, missing = interpreters()
    pythons = {v: path for v, path in here.items() if v != MATRIX["python"]["jobs"]}
    known = cases(setting, pythons)
    if unknown := sorted(set(options.cases) - set(known)):
        parser.error(f"unknown cases {', '.join(unknown)}; known are {', '.join(known)}")
    absent = [name for name in ROWS if name not in setting.backends()]
    for text in (f"backend {name}: no wheel of it was built" for name in absent):
        print(f"left out {text}", flush=True)
    for text in (f"Python {name}: it is not on this machine" for name in missing):
        print(f"left out {text}", flush=True)
    setting.prepare([MATRIX["python"]["jobs"], *pythons])
    wanted = {name: known[name] for name in options.cases or known}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        troubles = list(pool.map(lambda item: run(*item, setting), wanted.items()))
    failed = sum(bool(trouble) for trouble in troubles)
    print(f"{len(wanted) - failed} cases passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
