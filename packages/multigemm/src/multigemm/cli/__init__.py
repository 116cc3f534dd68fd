"""The command line: ``multigemm doctor``, ``multigemm demo``, ``multigemm bench``.

Nothing of it is imported by the library. Each command imports what it needs when it runs, so that
``multigemm doctor`` works where the demo's packages are missing.
"""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from ._app import app

    app()
