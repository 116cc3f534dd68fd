"""The real ROCm wheel on a machine without ROCm: what diagnosis needs of it, and its calls of stand-ins.

Public reports behind the cases: a backend for another PyTorch
(https://github.com/NVIDIA/cuEquivariance/issues/193), AMD's libraries of one release grafted in
(https://github.com/ROCm/aiter/pull/5318), a ROCm that changed under a package
(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1890).
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from loading_kit import Wheel, run_here

WHEEL = Wheel("rocm")
INFO, OPEN = WHEEL.info, WHEEL.open
pytestmark = [
    pytest.mark.skipif(not WHEEL.installed, reason="multigemm-rocm is not installed"),
    pytest.mark.skipif(torch.version.hip is not None, reason="this PyTorch has ROCm"),
]
COPIES = {"libtheirhip.so": (), "libtheirblas.so": ("-DBLAS",)}
SOURCE = Path(__file__).with_name("hip_stand_in.c")
STREAM, OTHER_STREAM = 0x5000, 0x6000
CALL = f"""
import torch
from multigemm import _abi
library = _abi.Library(handle, "rocm")
def call(implementation="", groups=(3, 0, 2), on_host=True, device=1, stream={STREAM},
         wgrad=False, transposed=False, explain=False):
    torch.manual_seed(0)
    x, w, y = torch.randn(6, 2), torch.randn(3, 2, 4), torch.full((6, 4), 9.0)
    gy, dw = torch.randn(6, 4), torch.full((3, 2, 4), 9.0)
    if transposed:
        w = w.mT.contiguous().mT
    sizes = torch.tensor(groups)
    if wgrad:
        problem = _abi.grouped_mm_wgrad_problem(x, gy, sizes, False, False, dw, "", implementation)
    else:
        problem = _abi.grouped_mm_problem(x, w, sizes, False, None, y, "", implementation)
    problem.groups.flags = 2 if on_host else 0
    problem.device, problem.stream = device, stream
    if explain:
        return library.explain(problem)
    status = library.call(problem)
    ends = [sum(groups[:g]) for g in range(4)]
    if wgrad:
        wanted = torch.stack([x[a:b].mT @ gy[a:b] for a, b in zip(ends, ends[1:])])
        right = torch.allclose(dw[[0, 2]], wanted[[0, 2]])
    else:
        wanted = torch.cat([x[a:b] @ w[g] for g, (a, b) in enumerate(zip(ends, ends[1:]))])
        right = torch.allclose(y[:5], wanted)
    return status, library.last_error() if status else "", right
"""
# Before the backend's library is opened; HIP and BLAS are paths.
LOAD = """
import ctypes
def load(path, log):
    library = ctypes.CDLL(path)
    getattr(library, log).restype = ctypes.c_char_p
    return library, lambda: getattr(library, log)().decode().splitlines()
hip, hip_log = load({hip!r}, "hip_log")
"""
LOAD_BLAS = 'hipblas, hipblas_log = load({blas!r}, "hipblas_log")\n'


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Paths of libraries that stand in for AMD's: the runtime, hipBLAS, and an older hipBLAS."""
    folder = tmp_path_factory.mktemp("stand_ins")

    def build(name, *flags):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags]
        subprocess.run([*command, f"-Wl,-soname,{path.name}", "-o", str(path), str(SOURCE)], check=True)
        return str(path)

    # What PyTorch is linked with: a runtime and a hipBLAS of its own, under its own library's name.
    theirs = [build(f"torch/{name}", *flags) for name, flags in COPIES.items()]
    torch_hip = folder / "torch" / "libtorch_hip.so"
    links = [f"-l:{Path(path).name}" for path in theirs]
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(torch_hip), "-Wl,--no-as-needed"]
    rpath = ["-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*command, f"-L{torch_hip.parent}", *links, *rpath], check=True)

    return {
        "torch": str(torch_hip),
        "torch_hip": theirs[0],
        "torch_blas": theirs[1],
        "hip": build("libamdhip64.so.7"),
        # As PyTorch's wheels rename their copies.
        "renamed": build("libamdhip64-0123abcd.so"),
        "blas": build("libhipblas.so.3", "-DBLAS"),
        "older": build("older/libhipblas.so.2", "-DBLAS", "-DOLDER"),
    }


# --- without anything of AMD's --------------------------------------------------------------------


def test_the_library_answers_without_rocm():
    shown = run_here(
        OPEN + "show(query=query, mapped=[p for p in mapped() if 'hip' in p], torch='torch' in sys.modules)"
    )
    assert not shown["torch"] and shown["mapped"] == []
    query = shown["query"]
    assert (query["name"], query["kind"], query["version"]) == ("rocm", "rocm", INFO["version"])
    assert query["abi"] == INFO["abi"] and query["protocol"] == INFO["protocol"]
    # And no kernel of another vendor's architecture.
    assert query["kernels"] == {
        "grouped_mm": ["rows_mfma", "rows_simt", "blas", "torch"],
        "grouped_mm_wgrad": ["wgrad_mfma", "wgrad_simt", "blas", "torch"],
    }


def test_a_call_without_rocm_fails_with_a_status():
    status, text, _ = run_here(OPEN + CALL + "show(result=call())")["result"]
    assert status != 0
    assert text.startswith("MG_DEVICE_ERROR") and "hipErrorNoDevice" in text
    assert "no HIP runtime, libamdhip64, is loaded in this process" in text


# --- a stand-in for the runtime -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "first"), [("hip", True), ("renamed", False)], ids=["runtime first", "library first"]
)
def test_kernels_are_launched_on_the_calls_device_and_stream(stand_ins, which, first):
    load = LOAD.format(hip=stand_ins[which])
    code = (load + OPEN if first else OPEN + load) + CALL
    shown = run_here(
        code + "show(result=call('simt'), log=hip_log(), again=call('simt'), log_again=hip_log())"
    )
    assert shown["result"][0] == shown["again"][0] == 0, shown
    # Once, before anything else, the code of each source: 0x48495046, as a little-endian machine has it.
    registered = [line.startswith("register") for line in shown["log"] + shown["log_again"]].index(False)
    assert registered >= 3 and set(shown["log"][:registered]) == {"register FPIH"}
    for log in (shown["log"][registered:], shown["log_again"]):
        assert not any(line.startswith("register") for line in log)
        # The guard: the call's device first, the caller's at last.
        assert (log[0], log[-1]) == ("device 1", "device 0")
        assert not any(line.startswith(("device", "synchronize", "copy")) for line in log[1:-1])
        launches = [line for line in log if line.startswith("launch")]
        assert all(f"device 1 stream {STREAM:#x} " in line for line in launches)
        for line in launches:
            assert re.search(r"blocks [1-9]\d* threads (64|256),1,1 shared 0 arguments 1$", line)
        names = [re.search(r"(write_values|group_scan|rows_simt)", line)[1] for line in launches]
        assert names == ["write_values", "group_scan", "rows_simt"]
        allocated = [line for line in log if line.startswith("allocate")]
        assert all(line.endswith(f"stream {STREAM:#x}") for line in allocated)
        assert log.count(f"free stream {STREAM:#x}") == len(allocated) > 0


@pytest.mark.parametrize("on_host", [False, True], ids=["sizes on the device", "sizes on the host"])
@pytest.mark.parametrize("wgrad", [False, True], ids=["rows", "wgrad"])
def test_matrix_cores_take_one_launch(stand_ins, wgrad, on_host):
    """With sizes on the device; sizes on the host are written there by one more. No workspace, no waiting."""
    code = LOAD.format(hip=stand_ins["hip"]) + OPEN + CALL
    shown = run_here(code + f"show(result=call('native', wgrad={wgrad}, on_host={on_host}), log=hip_log())")
    assert shown["result"][0] == 0, shown
    launches = [line for line in shown["log"] if line.startswith("launch")]
    operator = "wgrad_mfma" if wgrad else "rows_mfma"
    names = [re.search(r"(write_values|rows_mfma|wgrad_mfma)", line)[1] for line in launches]
    assert names == (["write_values", operator] if on_host else [operator])
    # Four wavefronts; all shared memory is the kernel's own.
    where = rf"Float32.* device 1 stream {STREAM:#x} blocks \d+ threads 256,1,1 shared 0 "
    assert re.search(where, launches[-1]), launches
    assert not any(line.startswith(("synchronize", "copy")) for line in shown["log"])
    assert on_host or not any(line.startswith("allocate") for line in shown["log"])


def test_the_callers_device_stays_when_it_is_the_calls(stand_ins):
    code = LOAD.format(hip=stand_ins["hip"]) + OPEN + CALL
    log = run_here(code + "show(result=call('simt', device=0), log=hip_log())")["log"]
    # Made current all the same, since a thread may have no context yet; nothing to restore.
    assert [line for line in log if line.startswith("device")] == ["device 0"]


def test_an_error_is_told_by_hips_name_and_the_device_restored(stand_ins):
    code = (
        LOAD.format(hip=stand_ins["hip"])
        + OPEN
        + CALL
        + """
told = {}
for name in ("hipDeviceGetAttribute", "hipSetDevice", "hipLaunchKernel"):
    hip.hip_fail(name.encode(), 719)
    told[name] = (*call("simt")[:2], hip_log())
hip.hip_fail(b"", 0)
show(told=told, after=call("simt")[0])
"""
    )
    shown = run_here(code)
    for name, (status, text, log) in shown["told"].items():
        assert status != 0
        assert text.startswith("MG_DEVICE_ERROR")
        assert "hipErrorLaunchFailure (unspecified launch failure)" in text
        devices = [line for line in log if line.startswith("device")]
        assert (
            devices
            == {
                "hipDeviceGetAttribute": [],  # asked before the guard
                "hipSetDevice": ["device 1"],
                "hipLaunchKernel": ["device 1", "device 0"],
            }[name]
        )
    assert shown["after"] == 0


def test_a_device_without_machine_code_is_told_as_that(stand_ins):
    code = LOAD.format(hip=stand_ins["hip"]) + OPEN + CALL + "hip.hip_fail(b'hipLaunchKernel', 209)\n"
    _, text, _ = run_here(code + "show(result=call('simt'))")["result"]
    assert text.startswith("MG_NO_DEVICE_CODE") and "was not built for this device" in text


def test_a_device_that_is_not_there(stand_ins):
    code = LOAD.format(hip=stand_ins["hip"]) + OPEN + CALL
    _, text, _ = run_here(code + "show(result=call('simt', device=2))")["result"]
    assert text.startswith("MG_INVALID_ARGUMENT") and "there are 2 devices" in text


def test_without_hipblas_the_own_kernels_serve(stand_ins):
    code = LOAD.format(hip=stand_ins["hip"]) + OPEN + CALL
    shown = run_here(code + "show(auto=call(), log=hip_log(), blas=call('blas'))")
    assert shown["auto"][0] == 0 and any("rows_mfma" in line for line in shown["log"])
    _, text, _ = shown["blas"]
    assert text.startswith("MG_UNSUPPORTED")
    assert "no hipBLAS of ROCm 7 (libhipblas.so.3) is loaded in this process" in text


# --- a stand-in for hipBLAS -----------------------------------------------------------------------


def with_blas(stand_ins, which="blas"):
    return LOAD.format(hip=stand_ins["hip"]) + LOAD_BLAS.format(blas=stand_ins[which]) + OPEN + CALL


def test_products_reach_hipblas_with_the_right_arguments(stand_ins):
    code = (
        with_blas(stand_ins)
        + """
cases = [{}, {"transposed": True}, {"wgrad": True}, {"groups": (2, 1, 2)}]
show(told=[(call("blas", **case), hipblas_log()) for case in cases])
"""
    )
    told = run_here(code)["told"]
    for (result, log), count in zip(told, (2, 2, 2, 3), strict=True):
        assert result == [0, "", True]
        products = [line for line in log if "gemm" in line]
        assert len(products) == count
        # float32 in, float32 sums, the default algorithm; and never sums in an order that varies.
        assert all(line.endswith("types 0 0 0 compute 2 algorithm 160") for line in products)
    assert "handle 1 atomics 0" in told[0][1]


def test_a_handle_goes_with_its_device_and_is_set_to_the_stream_of_each_call(stand_ins):
    code = (
        with_blas(stand_ins)
        + f"""
logs = []
for device, stream in [(1, {STREAM}), (1, {STREAM}), (1, {OTHER_STREAM}), (0, {STREAM})]:
    assert call("blas", device=device, stream=stream) == (0, "", True)
    logs.append(hipblas_log())
show(logs=logs)
"""
    )
    logs = run_here(code)["logs"]
    made = [[line for line in log if line.startswith("create")] for log in logs]
    assert made == [["create 1"], [], [], ["create 2"]]
    for log, number, stream in zip(logs, (1, 1, 1, 2), (STREAM, STREAM, OTHER_STREAM, STREAM), strict=True):
        body = [line for line in log if not line.startswith("create") and "atomics" not in line]
        assert body[:2] == [f"handle {number} stream {stream:#x}", f"handle {number} workspace {32 << 20}"]
        assert "gemm" in body[2]
        assert body[-1] == f"handle {number} stream (nil)"


def test_a_failure_of_hipblas_is_told_by_its_name(stand_ins):
    code = with_blas(stand_ins) + "hipblas.hipblas_fail(b'hipblasGemmStridedBatchedEx', 7)\n"
    shown = run_here(code + "show(result=call('blas'), log=hip_log())")
    _, text, _ = shown["result"]
    assert text.startswith("MG_DEVICE_ERROR")
    assert "hipblasGemmStridedBatchedEx failed: HIPBLAS_STATUS_NOT_SUPPORTED" in text
    assert shown["log"][-1] == "device 0"


def test_an_older_hipblas_is_not_taken(stand_ins):
    shown = run_here(with_blas(stand_ins, "older") + "show(result=call('blas'), log=hipblas_log())")
    _, text, _ = shown["result"]
    assert text.startswith("MG_UNSUPPORTED") and "no hipBLAS of ROCm 7" in text
    assert shown["log"] == []


def test_sizes_on_the_device_are_read_back_on_the_calls_stream(stand_ins):
    shown = run_here(with_blas(stand_ins) + "show(result=call('blas', on_host=False), log=hip_log())")
    assert shown["result"][0] == 0
    assert f"copy 24 kind 2 stream {STREAM:#x}" in shown["log"]
    assert f"synchronize stream {STREAM:#x}" in shown["log"]


def test_what_pytorch_is_linked_with_goes_before_other_copies(stand_ins):
    """A process with two runtimes: PyTorch's own, under another name, and the system's, loaded before it."""
    code = (
        LOAD.format(hip=stand_ins["hip"])
        + LOAD_BLAS.format(blas=stand_ins["blas"])
        + f"""
ctypes.CDLL({stand_ins["torch"]!r})
theirs, their_log = load({stand_ins["torch_hip"]!r}, "hip_log")
their_blas, their_blas_log = load({stand_ins["torch_blas"]!r}, "hipblas_log")
"""
        + OPEN
        + CALL
        + """
results = [call("simt")[0], *call("blas")]
show(results=results, system=hip_log() + hipblas_log(), torch=their_log(), blas=their_blas_log())
"""
    )
    shown = run_here(code)
    assert shown["results"] == [0, 0, "", True]
    assert shown["system"] == []
    assert any(line.startswith("launch") for line in shown["torch"])
    assert any("gemm" in line for line in shown["blas"])
