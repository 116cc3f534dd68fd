"""Device arrays of hip-python through the ROCm wheel, without PyTorch and CuPy; stand-ins do AMD's part.

Where hip-python itself is installed, it is tested as far as it goes without ROCm: it imports, and says at
the first call that there is no HIP runtime. https://github.com/ROCm/hip-python/issues/104
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loading_kit import Wheel, run_here
from test_rocm_wheel import STREAM, stand_ins  # noqa: F401

HERE = Path(__file__).resolve().parent
STAND_IN = str(HERE / "hip_python_stand_in")
wheel = pytest.mark.skipif(not Wheel("rocm").installed, reason="multigemm-rocm is not installed")
pytestmark = pytest.mark.skipif(torch.version.hip is not None, reason="this PyTorch has ROCm")

# Without PyTorch and CuPy; arrays of hip-python with NumPy's values.
START = f"""
import ctypes, os
sys.modules["torch"] = sys.modules["cupy"] = None
sys.path.insert(0, {STAND_IN!r})
import numpy as np
from multigemm import errors, interop
from hip import hip
runtime = ctypes.CDLL(os.environ["HIP_STAND_IN"])
runtime.hip_log.restype = ctypes.c_char_p
def log():
    return runtime.hip_log().decode().splitlines()
def on_host(array):
    found = array.__cuda_array_interface__
    dtype = np.dtype(found["typestr"])
    size = int(np.prod(found["shape"]))
    room = (ctypes.c_char * (size * dtype.itemsize)).from_address(found["data"][0])
    return np.frombuffer(room, dtype, size).reshape(found["shape"])
def on_device(values, typestr=None, **more):
    values = np.ascontiguousarray(values)
    _, array = hip.hipMalloc(values.nbytes)
    ctypes.memmove(int(array), values.ctypes.data, values.nbytes)
    return array.configure(_force=True, typestr=typestr or values.dtype.str, shape=values.shape, **more)
rng = np.random.default_rng(0)
x, w = (rng.standard_normal(s).astype("float32") for s in ((6, 2), (3, 2, 4)))
gy, sizes = rng.standard_normal((6, 4)).astype("float32"), [3, 0, 2]
wanted = np.concatenate([x[:3] @ w[0], x[3:5] @ w[2], np.zeros((1, 4), "float32")])
"""


@pytest.fixture
def hip(stand_ins):  # noqa: F811
    """Runs code in a process whose hip-python is the stand-in's."""

    def run(code, **env):
        blas = f"blas = ctypes.CDLL({stand_ins['blas']!r})\n"
        return run_here(START + blas + code, HIP_STAND_IN=stand_ins["hip"], **env)

    return run


@wheel
def test_products_run_on_the_arrays_device(hip):
    shown = hip("""
hip.hipSetDevice(1)
operands = [on_device(x), on_device(w)]
hip.hipSetDevice(0)
log()
y = interop.grouped_mm(*operands, sizes, implementation="blas")
found, lines = on_host(y), log()
dw = interop.grouped_mm_wgrad(operands[0], on_device(gy) if hip.hipSetDevice(1) else None, sizes,
                              implementation="blas")
show(close=bool(np.allclose(found[:5], wanted[:5])), type=type(y).__name__, log=lines,
     dw=bool(np.allclose(on_host(dw)[0], x[:3].T @ gy[:3], atol=1e-6)), device=hip.hipGetDevice()[1],
     torch=sys.modules["torch"] is not None)
""")
    assert shown["close"] and shown["dw"] and not shown["torch"]
    assert shown["type"] == "DeviceArray"
    # The array's device is current for the call, and the caller's again afterwards.
    assert "allocate 96 device 1" in shown["log"]
    assert shown["log"][-1] == "device 0" and shown["device"] == 1
    assert not any("device 0" in line for line in shown["log"] if line.startswith(("allocate", "launch")))


@wheel
def test_out_is_written_and_the_arrays_stream_is_taken(hip):
    shown = hip(f"""
out = on_device(np.full((6, 4), 9, "float32"), "float32")
log()
arrays = [on_device(x, "f4", stream={STREAM}), on_device(w, stream={STREAM + 16})]
same = interop.grouped_mm(*arrays, sizes, out=out, implementation="blas") is out
show(same=same, close=bool(np.allclose(on_host(out)[:5], wanted[:5])), log=log())
""")
    assert shown["same"] and shown["close"]
    # The one stream is the call's, the other is waited for.
    assert f"synchronize stream {STREAM + 16:#x}" in shown["log"]
    frees = [line for line in shown["log"] if line.startswith("free stream")]
    assert frees and set(frees) == {f"free stream {STREAM:#x}"}


@wheel
def test_sizes_on_the_device_are_read_only_to_be_checked(hip):
    code = """
texts, logs = [], []
for values in ([3, 0, 2], [3, -1, 2]):
    given = on_device(np.array(values))
    log()
    try:
        hip.hipFree(interop.grouped_mm(on_device(x), on_device(w), given))
    except errors.GroupSizesError as error:
        texts.append(str(error))
    logs.append(log())
show(texts=texts, logs=logs)
"""
    unchecked, checked = hip(code), hip(code, MULTIGEMM_CHECK="1")
    assert unchecked["texts"] == [] and len(checked["texts"]) == 1
    assert "got group_sizes[1] = -1" in checked["texts"][0]
    for log in unchecked["logs"]:
        assert not any(line.startswith(("copy", "synchronize")) for line in log)
    for log in checked["logs"]:
        assert "copy 24 kind 2 device 0" in log
    launched = [any(line.startswith("launch") for line in log) for log in checked["logs"]]
    assert launched == [True, False]


@wheel
def test_what_cannot_be_is_refused(hip):
    shown = hip("""
hip.hipSetDevice(1)
other = on_device(w)
hip.hipSetDevice(0)
texts = []
for arrays in ((on_device(x), other), (on_device(x), w), (on_device(x, "<u4"), on_device(w, "<u4"))):
    try:
        interop.grouped_mm(*arrays, sizes)
    except (errors.DeviceError, errors.DTypeError) as error:
        texts.append(str(error))
runtime.hip_fail(b"hipMalloc", 719)
try:
    interop.grouped_mm(on_device(x), on_device(w), sizes)
except errors.NativeError as error:
    texts.append(str(error))
show(texts=texts)
""")
    devices, host, dtype, memory = shown["texts"]
    assert "w must be on the device of x, cuda:0, got cuda:1" in devices
    assert "w must be on the device of x, cuda:0, got cpu" in host
    assert "x must be float64" in dtype and "got u4" in dtype
    assert "hipMalloc failed: hipErrorLaunchFailure (719)" in memory


@wheel
def test_arrays_of_others_are_served_where_there_is_no_cupy(hip):
    """Any object with the interface, on memory that HIP knows; a stride that is not a line's is kept."""
    shown = hip("""
class Foreign:
    def __init__(self, array, **changes):
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | changes
columns = on_device(np.ascontiguousarray(w.transpose(0, 2, 1)))
transposed = Foreign(columns, shape=w.shape, strides=(32, 4, 8))
del sys.modules["cupy"]
import importlib.util
assert importlib.util.find_spec("cupy") is None
y = interop.grouped_mm(Foreign(on_device(x)), transposed, sizes, implementation="blas")
show(close=bool(np.allclose(on_host(y)[:5], wanted[:5])))
""")
    assert shown["close"]


@pytest.mark.parametrize("there", [True, False], ids=["HIP", "no HIP"])
def test_devices_are_found_without_pytorch(stand_ins, there):  # noqa: F811
    code = f"""
sys.modules["torch"] = None
sys.path.insert(0, {STAND_IN!r})
from multigemm import interop
show(devices=[[d.index, d.name, d.architecture, d.memory] for d in interop.hip_devices()])
"""
    shown = run_here(code, **({"HIP_STAND_IN": stand_ins["hip"]} if there else {}))
    wanted = [[i, "AMD Instinct MI300X", "gfx942", 192 << 30] for i in range(2)]
    assert shown["devices"] == (wanted if there else [])


def test_no_devices_without_hip_python():
    code = 'sys.modules["hip"] = None\nfrom multigemm import interop\nshow(devices=interop.hip_devices())'
    assert run_here(code)["devices"] == []


@pytest.mark.skipif(importlib.util.find_spec("hip") is None, reason="hip-python is not installed")
def test_the_real_package_without_rocm():
    """Its arrays are read as the stand-in's are; without ROCm there is no device to ask."""
    code = """
import sys
from hip import hip
from hip._util.types import DeviceArray
from multigemm.interop import _hip, hip_devices
assert hip_devices() == []
array = DeviceArray(0x7000).configure(_force=True, typestr="<f4", shape=(3, 4))
assert _hip.is_hips(array)
view = _hip.View(array, 0)
assert (view.data.ptr, view.shape, view.strides) == (0x7000, (3, 4), (16, 4)), vars(view)
assert view.dtype.name == "float32" and view.stream == 0
array.configure(stream=5)
assert _hip.View(array, 0).stream == 5
for name in ("hipPointerGetAttributes", "hipPointerAttribute_t", "hipGetDevice", "hipSetDevice", "hipMalloc"):
    assert hasattr(hip, name)
try:
    _hip.View(array)
except RuntimeError as error:
    assert "libamdhip64" in str(error)
else:
    raise AssertionError("there is a HIP runtime")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
