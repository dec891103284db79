"""What leads through the gates of a peer: whoever names one is not written to past it."""

from types import SimpleNamespace

import pytest
from passing import enter

from kvxfer.safety.fence import FIRST_GENERATION, LockFile, PeerGates

GATES = 4


def granted(gate):
    return gate << 32 | FIRST_GENERATION


@pytest.mark.parametrize(("known", "gate", "enters"), [(True, 2, True), (True, GATES, False), (False, 2, False)])
def test_nobody_enters_a_gate_that_is_not_there_or_to_which_there_is_no_key(monkeypatch, known, gate, enters):
    """Its owner takes an empty gate for evidence."""
    monkeypatch.setattr("kvxfer.safety.fence.unlike", lambda host: "" if known else "it is on another host")
    locks, keys = LockFile(GATES), PeerGates()
    body = SimpleNamespace(locks=locks.handle, host="")
    peer = SimpleNamespace(identity=SimpleNamespace(incarnation=b"i"), body=body, process=0)
    keys.on_session(peer)  # pyright: ignore[reportArgumentType]
    passage = keys.passage(peer, granted(gate))  # pyright: ignore[reportArgumentType]
    assert passage is not None
    passed = enter(passage)
    assert (passed is not None) is enters
    if passed:
        passed.leave()
    assert keys.passage(peer, 0) is None, "there is nothing to pass"  # pyright: ignore[reportArgumentType]
    keys.close()
    locks.close()
