"""The call styles of other libraries, served by multigemm's operators."""

from . import grouped_gemm as grouped_gemm
from ._torch import grouped_mm as grouped_mm

__all__ = ["grouped_gemm", "grouped_mm"]
