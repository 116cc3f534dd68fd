"""In place of hip-python: the part of it that multigemm calls, over the stand-in for the HIP runtime.

As the real one it is importable anywhere, opens libamdhip64 at the first call, answers with a tuple whose
first entry is the status, and gives arrays of contiguous memory that nobody frees.
"""

HIP_PYTHON_VERSION = "7.2.2.562.43"
