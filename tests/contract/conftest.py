"""The stand-in for a GPU backend, compiled once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract.gpu_stand_in import kit


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> kit.Library:
    if kit.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return kit.Library(kit.build(tmp_path_factory.mktemp("gpu_stand_in")))


@pytest.fixture
def standin(standin_library: kit.Library) -> Iterator[kit.Library]:
    standin_library.control["reset"]()
    yield standin_library
    standin_library.control["reset"]()
