"""A process in another PID namespace, as that of another Pod, is killed in the midst of a transfer: that is seen.

It shares neither locks nor memory with the survivor, which has nothing but its end to go by.
"""

import os
from functools import partial

import pytest
from faults import Case, Ends, scene

from kvxfer.mapped.host import number_of

CASES = [
    Case("sender", "in the midst of the write", "staged", "kill", "tcp"),
    Case("sender", "in the midst of the write", "direct", "kill", "tcp"),
    Case("receiver", "in the midst of the read", "pull", "kill", "tcp"),
]


@pytest.fixture(scope="module")
def namespaces():
    """Skips where this process may not make one, or its kernel cannot tell processes apart across them."""
    child = os.fork()
    if not child:
        from actors import apart

        try:
            apart()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        pytest.skip(f"a PID namespace of its own: {os.strerror(os.waitstatus_to_exitcode(status))}")
    descriptor = os.pidfd_open(os.getpid())
    try:
        if not number_of(descriptor):
            pytest.skip("this kernel has no numbers of processes that hold in every namespace (Linux 6.9)")
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_its_end_ends_the_doubt(company, case):
    assert case.ends in (Ends.REBUILT, Ends.HEARD)  # before, only closing this worker did
    # what is heard of because it is seen is so however slow these cores are
    settings = {"revoke_timeout": 5.0} if case.ends is Ends.HEARD else {}
    await company.play(case.lane, partial(scene, case, **settings), apart=True)
