"""Makes the kit importable under every import mode of pytest, and gives each test a site folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loading_kit import Site


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site")
