"""Processes to whom faults happen, and their company."""

import importlib.util

import pytest

pytest.register_assert_rewrite("faults", "soak")

from company import Company  # noqa: E402 - what it asserts is rewritten by then

collect_ignore_glob = [] if importlib.util.find_spec("nixl") else ["test_*.py"]  # all of them are about NIXL


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
