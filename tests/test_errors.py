"""Errors that cross processes: pickled, as multiprocessing and Ray do with what a worker raises elsewhere."""

import copy
import pickle

import pytest

from kvxfer import errors
from kvxfer.errors import Code

REPORT = errors.FailureReport(
    request="r", transfer="t", peer="p", step=errors.Step.MOVING, elapsed=1.5, code=Code.FAILED, reason="why"
)
BLOCKS = {"default": (3, 4)}


SPECIAL = [
    errors.BusyError("no room"),
    errors.UnreachableError("nobody there", peer="prefill[0]"),
    errors.MismatchError("differ", peer="p", fields={"dtype": ("bf16", "fp8")}),
    errors.RefusedError("no", peer="p", reason=Code.TOO_MANY, retry_after=2.5),
    errors.TransferTimeoutError("late", peer="p", transfer="t", blocks=BLOCKS),
    errors.TransferFailedError("bad", reason=Code.FABRIC, peer="p", transfer="t", blocks=BLOCKS),
    errors.IntegrityError("damaged", chunk=3, layers=[1], damaged=BLOCKS, peer="p", transfer="t", blocks=BLOCKS),
    errors.FabricError("down", disconnected=True, in_doubt=True),
]
PLAIN = [
    kind("what happened")
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, errors.KvxferError)
    and name == kind.__name__
    and kind not in {errors.IntegrityError, errors.MemoryInDoubtError}
]


def crossed(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("error", [*PLAIN, *SPECIAL], ids=lambda error: type(error).__name__)
def test_an_error_says_the_same_in_another_process(error):
    error.report = REPORT
    error.add_note("in rank 3")
    there = crossed(error)
    assert type(there) is type(error)
    assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))


async def test_memory_in_doubt_is_settled_where_it_is():
    async def settled():
        """A closure, which cannot be pickled; what workers give is no better."""

    here = errors.MemoryInDoubtError("silent", settled=settled, peer="p", transfer="t", blocks=BLOCKS)
    for error in (here, copy.copy(here), copy.deepcopy(here)):
        await error.settled()
        assert (str(error), error.peer, error.blocks) == ("silent", "p", BLOCKS)
    there = crossed(here)
    assert (str(there), there.peer, there.blocks, there.memory_safe) == ("silent", "p", BLOCKS, False)
    for error in (there, crossed(there)):
        with pytest.raises(errors.UsageError, match="in another process"):
            await error.settled()
