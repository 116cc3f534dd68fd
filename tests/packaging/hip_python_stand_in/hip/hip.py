"""The functions, by ctypes over the library that HIP_STAND_IN names; without it there is no HIP here."""

import ctypes
import enum
import os
from types import SimpleNamespace

from ._util.types import DeviceArray

devices = {}  # of memory, by address


class hipError_t(enum.IntEnum):  # HIP's own names, here and below
    hipSuccess = 0
    hipErrorInvalidValue = 1
    hipErrorLaunchFailure = 719


class hipMemcpyKind(enum.IntEnum):
    hipMemcpyDeviceToHost = 2


def _library():
    path = os.environ.get("HIP_STAND_IN")
    if not path:
        raise RuntimeError("failed to dlopen 'libamdhip64.so'")
    return ctypes.CDLL(path)


def _call(name, *arguments):
    return hipError_t(getattr(_library(), name)(*arguments))


def _number(name):
    value = ctypes.c_int()
    return _call(name, ctypes.byref(value)), value.value


def hipGetDeviceCount():
    return _number("hipGetDeviceCount")


def hipGetDevice():
    return _number("hipGetDevice")


def hipSetDevice(index):
    return (_call("hipSetDevice", index),)


def hipRuntimeGetVersion():
    return hipError_t.hipSuccess, 70253211


def hipDeviceProp_t():
    return SimpleNamespace()


def hipGetDeviceProperties(properties, index):
    properties.name, properties.gcnArchName = b"AMD Instinct MI300X", b"gfx942:sramecc+:xnack-"
    properties.totalGlobalMem = 192 << 30
    return (hipError_t.hipSuccess,)


def hipMalloc(size):
    pointer = ctypes.c_void_p()
    status = _call("hipMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
    devices[pointer.value] = hipGetDevice()[1]
    return status, DeviceArray(pointer.value).configure(_force=True, shape=(size,))


def hipFree(array):
    return (_call("hipFree", ctypes.c_void_p(int(array))),)


def hipPointerAttribute_t():
    return SimpleNamespace(device=-1)


def hipPointerGetAttributes(attributes, array):
    pointer = array.__cuda_array_interface__["data"][0]
    if pointer not in devices:
        return (hipError_t.hipErrorInvalidValue,)
    attributes.device = devices[pointer]
    return (hipError_t.hipSuccess,)


def hipStreamSynchronize(stream):
    return (_call("hipStreamSynchronize", ctypes.c_void_p(stream)),)


def hipMemcpy(to, array, size, kind):
    address, _ = to.buffer_info()
    pointer = ctypes.c_void_p(array.__cuda_array_interface__["data"][0])
    return (_call("hipMemcpy", ctypes.c_void_p(address), pointer, ctypes.c_size_t(size), int(kind)),)
