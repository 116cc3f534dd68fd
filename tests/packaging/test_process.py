"""What loading does to the process: order of imports, threads, forks, drivers, cost of the import.

Public reports behind the cases: an extension opened before PyTorch
(https://github.com/pytorch/extension-cpp/pull/127), one namespace registered twice
(https://github.com/metatensor/metatensor/issues/871), a missing driver that broke an import
(https://github.com/NVIDIA-NeMo/Curator/issues/109), devices asked at import so that forked workers failed
(https://github.com/vllm-project/vllm/pull/15951, https://github.com/pytorch/pytorch/issues/81758).
"""

import importlib.util
from pathlib import Path

import pytest
from loading_kit import Site, compile_library, real_torch, run, start

KERNELS = Path(__file__).with_name("native_kernels.c").read_text()
TORCH = Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
PRODUCT = """
import torch
def product():
    import multigemm
    x, w = torch.ones(3, 2), torch.ones(2, 2, 4)
    return multigemm.grouped_mm(x, w, torch.tensor([1, 2])).unique().tolist()
"""


def extra(fill):
    return f"#define FILL {fill}\n{KERNELS}"


@pytest.fixture(scope="session")
def torch_site(tmp_path_factory):
    return real_torch(tmp_path_factory.mktemp("torch"))


@pytest.fixture
def native(site):
    """A CPU backend whose product is 7 everywhere, so that a call shows who answered it."""
    site.backend("cpu", extra=extra(7), needs=[TORCH])
    return site


def test_without_a_backend_the_reference_answers(site, torch_site):
    assert run(PRODUCT + "show(y=product())", site, torch_site)["y"] == [2.0]


@pytest.mark.parametrize(
    "first",
    [
        "import multigemm_cpu",
        "import multigemm_cpu, torch",
        "import multigemm, multigemm_cpu",
        "import torch, multigemm",
        "from multigemm import _dispatch; _dispatch.backend_for('cpu')",
    ],
)
def test_the_order_of_imports_does_not_matter(native, torch_site, first):
    assert run(f"{first}\n{PRODUCT}\nshow(y=product())", native, torch_site)["y"] == [7.0]


def test_a_backend_package_is_data_only(native, torch_site):
    code = """
import multigemm_cpu
show(torch="torch" in sys.modules, mapped=[path for path in mapped() if "gemm" in path])
"""
    assert run(code, native, torch_site) == {"torch": False, "mapped": []}


def test_the_library_cannot_be_opened_before_torch(native, torch_site):
    """The control for the order of imports: a test process that holds PyTorch would hide this."""
    library = native.folder / "multigemm_cpu" / "lib" / "libmultigemm_cpu.so"
    code = f"""
import ctypes
def attempt():
    try:
        ctypes.CDLL({str(library)!r})
    except OSError as error:
        return str(error)
early = attempt()
import multigemm
show(early=early, late=attempt())
"""
    shown = run(code, native, torch_site)
    assert "libtorch_cpu.so" in shown["early"]
    assert shown["late"] is None


def test_two_builds_of_one_namespace_do_not_abort(native, torch_site, tmp_path):
    second = compile_library(tmp_path / "second.so", extra(9), needs=[TORCH])
    code = (
        f"{PRODUCT}\nfirst = product()\ntorch.ops.load_library({str(second)!r})\nshow(y=[first, product()])"
    )
    first, after = run(code, native, torch_site)["y"]
    assert first == [7.0]
    assert after in ([7.0], [9.0])


def test_a_second_schema_would_abort(site, torch_site, tmp_path):
    """The control: what backends must never do, and why Python could not catch it."""
    wrong = compile_library(tmp_path / "wrong.so", f"#define DEFINE_SCHEMA\n{KERNELS}", needs=[TORCH])
    code = f"""
import multigemm, torch
try:
    torch.ops.load_library({str(wrong)!r})
except BaseException:
    pass
show(alive=True)
"""
    done = start(code, site, torch_site)
    assert done.returncode < 0
    assert "RESULT" not in done.stdout


@pytest.mark.parametrize("opened", [True, False])
def test_a_forked_child_calls(native, torch_site, opened):
    code = f"""{PRODUCT}
import os
torch.set_num_threads(1)
import multigemm
before = product() if {opened} else None
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, repr(product()).encode())
    os._exit(0)
os.close(writer)
_, status = os.waitpid(child, 0)
show(before=before, status=status, child=os.read(reader, 100).decode(), after=product())
"""
    shown = run(code, native, torch_site, arguments=["-W", "ignore"])
    assert shown["status"] == 0
    assert shown["child"] == "[7.0]"
    assert shown["after"] == [7.0]
    assert shown["before"] == ([7.0] if opened else None)


STUCK = """
import os, signal, threading, time
import torch
from multigemm import _dispatch, _opening
entered = threading.Event()
real = _opening.open_backend
parent = os.getpid()
def slow(*arguments):
    if os.getpid() == parent:
        entered.set()
        time.sleep(1)
    return real(*arguments)
_opening.open_backend = slow
opener = threading.Thread(target=lambda: _dispatch.backend_for({device!r}))
opener.start()
entered.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # a lock inherited from the opening thread would never be released
    os._exit(0 if _dispatch.backend_for({device!r}).name == {name!r} else 3)
_, status = os.waitpid(child, 0)
opener.join()
show(status=status, name=_dispatch.backend_for({device!r}).name, opened=len(torch.ops.calls))
"""


def test_a_child_forked_while_another_thread_opens(site):
    site.stub_torch().stub_front().backend("cpu")
    code = STUCK.format(device="cpu", name="cpu")
    shown = run(code, site, arguments=["-W", "ignore"])
    assert shown == {"status": 0, "name": "cpu", "opened": 1}


def test_a_gpu_backend_says_that_it_cannot_follow_a_fork(site):
    site.stub_torch(cuda="13.0").stub_front().backend("cu13")
    code = """
import os
from multigemm import _dispatch
_dispatch.backend_for("cuda")
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    try:
        _dispatch.backend_for("cuda")
    except ImportError as error:
        os.write(writer, str(error).encode())
    os._exit(0)
os.close(writer)
os.waitpid(child, 0)
show(text=os.read(reader, 1000).decode(), parent=_dispatch.backend_for("cuda").name)
"""
    shown = run(code, site, arguments=["-W", "ignore"])
    assert "spawn" in shown["text"]
    assert "forked" in shown["text"]
    assert shown["parent"] == "cu13"


@pytest.mark.parametrize("fault", [{}, {"abi": 2}])
def test_eight_threads_open_once(site, fault):
    site.stub_torch(cuda="13.0").stub_front().backend("cu13", **fault)
    code = """
import threading, time
from multigemm import _dispatch, _discovery
import torch
scans = []
real = _discovery.installed
def slow():
    scans.append(1)
    time.sleep(0.2)
    return real()
_discovery.installed = slow
barrier, answers = threading.Barrier(8), []
def ask():
    barrier.wait()
    try:
        answers.append(id(_dispatch.backend_for("cuda")))
    except ImportError as error:
        answers.append(str(error))
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
show(answers=answers, scans=len(scans), opened=len(torch.ops.calls))
"""
    shown = run(code, site)
    assert len(shown["answers"]) == 8
    assert len(set(shown["answers"])) == 1
    assert shown["scans"] == 1
    assert shown["opened"] == (0 if fault else 1)


def test_threads_call_the_operator_at_once(native, torch_site):
    code = f"""{PRODUCT}
import threading, multigemm
barrier, answers = threading.Barrier(8), []
def ask():
    barrier.wait()
    answers.append(product())
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
show(answers=answers)
"""
    assert run(code, native, torch_site)["answers"] == [[7.0]] * 8


# Every public function of torch.cuda raises from here on; its classes stay, other modules name them.
POISON = """
import torch, types
touched = []
def poison(name):
    def raising(*arguments, **options):
        touched.append(name)
        raise RuntimeError(f"torch.cuda.{name} was called")
    return raising
for name, value in list(vars(torch.cuda).items()):
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        setattr(torch.cuda, name, poison(name))
for name in [name for name in dir(torch._C) if name.startswith("_cuda")]:
    setattr(torch._C, name, poison(name))
"""


@pytest.mark.parametrize("backend", [True, False])
def test_import_and_cpu_call_leave_torch_cuda_alone(site, torch_site, backend):
    if backend:
        site.backend("cpu", extra=extra(7), needs=[TORCH])
    site.backend("cu13")
    code = POISON + PRODUCT + "y = product()\nfrom multigemm import _dispatch\n_dispatch.findings()\n"
    shown = run(code + "show(y=y, touched=touched)", site, torch_site)
    assert shown == {"y": [7.0 if backend else 2.0], "touched": []}


def test_dispatch_and_torch_cuda_whose_every_attribute_raises(site):
    """The stub's ``torch.cuda`` raises for attributes too, also where a GPU backend is opened."""
    site.stub_torch(cuda="13.0").stub_front()
    site.backend("cu13")
    site.backend("cpu")
    code = """
from multigemm import _dispatch
show(names=[_dispatch.backend_for(device).name for device in ("cpu", "cuda")])
"""
    assert run(code, site)["names"] == ["cpu", "cu13"]


def test_no_driver_is_needed(native, torch_site):
    native.backend("cu13")
    code = PRODUCT + "show(y=product(), gpu=[p for p in mapped() if 'libcuda' in p or 'libamdhip' in p])"
    assert run(code, native, torch_site) == {"y": [7.0], "gpu": []}


def test_doctor_runs_without_a_driver_or_a_sound_backend(site, torch_site):
    site.backend("cu13", protocol=2)
    site.backend("cpu", abi=2)
    site.record("cu12")
    code = (
        "import runpy\nsys.argv = ['multigemm', 'doctor']\nrunpy.run_module('multigemm', run_name='__main__')"
    )
    done = start(code, site, torch_site, env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert "Traceback" not in done.stderr, done.stderr
    for name in ("cpu", "cu12", "cu13"):
        assert name in done.stdout
    assert "ABI 2" in done.stdout


def test_importing_the_front_loads_nothing_and_scans_nothing(native, torch_site):
    """Beyond what PyTorch maps, only extension modules of the standard library may appear."""
    code = """
import torch
import importlib.metadata
before = set(mapped())
def scanned(*arguments, **options):
    raise AssertionError("scanned at import")
importlib.metadata.distributions = importlib.metadata.entry_points = scanned
import multigemm
show(new=sorted(set(mapped()) - before))
"""
    shown = run(code, native, torch_site)
    assert [path for path in shown["new"] if "lib-dynload" not in path] == []


def test_the_import_is_cheap(native, torch_site):
    """At most 15 ms beyond PyTorch, where PyTorch itself takes a second.

    On a slower or busier machine both take longer, so the bound grows with PyTorch's time in the same
    process. Processor time, and the least disturbed of the runs after the first, which writes bytecode.
    """
    code = """
import time
def spent(start):
    return time.process_time() - start
start = time.process_time()
import torch
seconds, start = spent(start), time.process_time()
import multigemm
show(ms=1000 * spent(start), torch=seconds)
"""
    shown = [run(code, native, torch_site, env={"PYTHONDONTWRITEBYTECODE": ""}) for _ in range(5)][1:]
    assert min(each["ms"] / max(1.0, each["torch"]) for each in shown) <= 15, shown


def test_remembered_answers_cost_a_dict_lookup(site):
    """Bounded by calls of Python functions, which no machine's speed changes."""
    site.stub_torch(cuda="13.0").stub_front().backend("cu13")
    code = """
from multigemm import _dispatch
_dispatch.backend_for("cuda")
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
_dispatch.backend_for("cuda")
sys.setprofile(None)
show(calls=len(calls))
"""
    assert run(code, site)["calls"] == 1


def test_a_backend_opens_beside_the_real_torch_with_its_report(native, torch_site):
    code = """
from multigemm import _dispatch
text, steps = _dispatch.report("cpu")
backend = _dispatch.backend_for("cpu")
show(text=text, steps=steps, name=backend.name, kind=backend.kind, query=dict(backend.query))
"""
    shown = run(code, native, torch_site)
    assert shown["name"] == shown["kind"] == "cpu"
    assert shown["query"] == {"abi": 1}
    assert "cpu 0.1.0" in shown["text"]
    assert len(shown["steps"]) == 3


def test_a_refused_backend_warns_once_and_the_product_is_right(torch_site, tmp_path):
    site = Site(tmp_path / "refused")
    site.backend("cpu", extra=extra(7), needs=[TORCH], version="0.2.0")
    code = f"""{PRODUCT}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    answers = [product(), product()]
show(answers=answers, warnings=[str(w.message) for w in caught if "multigemm" in str(w.message)])
"""
    shown = run(code, site, torch_site)
    assert shown["answers"] == [[2.0], [2.0]]
    [text] = shown["warnings"]
    assert "0.2.0" in text
    assert 'pip install "multigemm-cpu==0.1.0"' in text
