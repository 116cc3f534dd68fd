"""The stand-in for a GPU backend, compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.gpu_stand_in import kit


@pytest.fixture(scope="session")
def standin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is built."""
    if kit.compiler() is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("gpu_stand_in")
    kit.build(folder)
    return folder


@pytest.fixture(scope="session")
def standin_library(standin_folder: Path) -> kit.Library:
    return kit.Library(standin_folder / "libmultigemm_standin.so")


@pytest.fixture
def standin(standin_library: kit.Library) -> Iterator[kit.Library]:
    standin_library.control["reset"]()
    yield standin_library
    standin_library.control["reset"]()
