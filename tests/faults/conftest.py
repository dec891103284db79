"""Puts this folder on the path, and that of the helpers `stage` and `far`."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

pytest.register_assert_rewrite("faults", "ranks", "stall", "soak")

from company import Company  # noqa: E402 - found by the lines above
from faults import EVERYTHING  # noqa: E402

collect_ignore_glob = [] if importlib.util.find_spec("nixl") else ["test_*.py"]  # all of them are about NIXL


@pytest.fixture(scope="session")
def everything():
    """Whether all cases are asked for."""
    return EVERYTHING


@pytest.fixture(scope="session")
def troupe():
    """Processes that outlive the cases."""
    kept = Company()
    yield kept
    kept.end()


@pytest.fixture
async def company(troupe):
    """The same; they listen to the loop of one test."""
    yield troupe
    troupe.leave_loop()
