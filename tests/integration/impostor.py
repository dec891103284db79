"""A worker that says to be another one: it knows all of it that is public, and has not its key."""

from contextlib import contextmanager

import inside
import pytest

from kvxfer.protocol.session import IdentityKey


class Posing(IdentityKey):
    """Made of other private bytes than the incarnation that it shows."""

    def __init__(self, private, incarnation):
        super().__init__(private)
        self.__dict__["incarnation"] = incarnation


@contextmanager
def posing_as(worker):
    """Who is opened meanwhile shows the incarnation of this worker."""
    incarnation = bytes.fromhex(worker.card.incarnation)
    with pytest.MonkeyPatch.context() as patch:
        inside.identify_by(lambda private: Posing(private, incarnation), patch)
        yield


def made_up(twin, worker):
    """It says of itself all that the other one says, and asks nobody for a proof."""
    assert twin.card.incarnation == worker.card.incarnation
    inside.tell_the_same(twin, worker)
    inside.ask_no_proof(twin)
    return twin
