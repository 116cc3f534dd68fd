"""The operators on arrays of other libraries than PyTorch, which need not be installed.

CuPy arrays, and device arrays that speak ``__cuda_array_interface__`` or DLPack, run on their device and
on CuPy's current stream of it, and give CuPy arrays. Arrays of hip-python give such arrays, without CuPy;
``hip_devices`` tells what AMD devices there are. NumPy arrays, and host arrays that speak DLPack, give
NumPy arrays. The products go through the C ABI; there are no derivatives.
"""

from ._calls import grouped_mm as grouped_mm
from ._calls import grouped_mm_wgrad as grouped_mm_wgrad
from ._hip import HipDevice as HipDevice
from ._hip import hip_devices as hip_devices

__all__ = ["HipDevice", "grouped_mm", "grouped_mm_wgrad", "hip_devices"]
