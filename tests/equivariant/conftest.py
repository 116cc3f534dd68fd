"""Imports the packages that are compared with, where they are, without the warnings of their imports."""

import contextlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        import cuequivariance_torch  # noqa: F401
    with contextlib.suppress(ImportError):
        import mace.modules  # noqa: F401  # before e3nn 0.4, which it lets read its tables
