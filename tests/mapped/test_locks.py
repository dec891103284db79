"""The lock of a gate: who may be inside, what its owner finds, and what a writer leaves that is stopped or killed."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from passing import enter
from preloaded import Away

from kvxfer.errors import FabricError
from kvxfer.mapped.host import create, handle_of
from kvxfer.safety.fence import FIRST_GENERATION, LockFile, PeerGate, Permit, Revoked
from kvxfer.safety.fence import GATES as MOST

GATES = 64


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def file():
    file = LockFile(GATES)
    yield file
    file.close()


@pytest.fixture
def key(file):
    key = PeerGate(file.handle)
    yield key
    key.close()


@pytest.mark.parametrize("number", [-1, GATES, 1 << 32])
def test_nobody_gets_through_a_gate_that_there_is_not(key, number):
    assert enter(Permit(key, number, FIRST_GENERATION)) is None


def test_who_waits_with_a_closed_key_does_not_get_in(file):
    key = PeerGate(file.handle)
    passage, outside = Permit(key, 3, FIRST_GENERATION), Permit(key, 4, FIRST_GENERATION)
    inside = enter(passage)
    assert inside
    key.close()
    assert not enter(outside)
    assert file.revoke(3) is None  # it is closed when the last one has left
    before = descriptors()
    inside.leave()
    assert descriptors() == before - 2  # its own, and that of its pages
    assert file.revoke(3) is Revoked.IDLE
    assert not enter(passage)


def test_a_key_that_is_closed_with_somebody_inside_leaves_them_as_dead(file):
    key, before = PeerGate(file.handle), descriptors()
    passage = Permit(key, 3, FIRST_GENERATION)
    assert enter(passage)
    key.close()
    assert not key._pages.closed
    passage.give_back()
    assert (key._pages.closed, descriptors()) == (True, before - 2)
    assert file.revoke(3) is Revoked.DIED


def test_neither_side_leaves_a_descriptor():
    gc.collect()
    before = descriptors()
    for _ in range(8):
        file = LockFile(GATES)
        PeerGate(file.handle).close()
        file.close()
    assert descriptors() == before


def test_what_is_no_such_file_is_refused(file, tmp_path):
    with pytest.raises(FabricError, match="3 bytes names no shared memory"):
        PeerGate(b"abc")
    other = LockFile(GATES)
    handle = other.handle
    other.close()
    with pytest.raises(FabricError, match=r"cannot be opened|is not"):
        PeerGate(handle)
    PeerGate(file.handle).close()


@pytest.mark.parametrize(("nbytes", "gates"), [(16, 1), (21, 1), (8 * (MOST + 1), MOST), (1 << 44, MOST)])
def test_a_file_has_so_many_gates_however_long_it_is(nbytes, gates):
    descriptor = create("kvxfer-gates", nbytes)
    key = PeerGate(handle_of(descriptor))
    assert enter(Permit(key, gates, FIRST_GENERATION)) is None
    inside = enter(Permit(key, gates - 1, FIRST_GENERATION))
    assert inside
    inside.leave()
    key.close()
    os.close(descriptor)


def test_writers_of_many_threads_and_an_owner_that_takes_grants_back(file):
    """Under a generation that was raised, nobody is inside: not even for a moment."""
    key, inside, wrong = PeerGate(file.handle), [0] * GATES, []
    mutex, ended = threading.Lock(), threading.Event()

    def write(seed):
        number = seed % 4
        while not ended.is_set():
            granted = file.words[2 * number] + FIRST_GENERATION
            passed = enter(Permit(key, number, granted))
            if passed:
                with mutex:
                    inside[number] += 1
                if file.words[2 * number] + FIRST_GENERATION != granted:
                    wrong.append("raised with somebody inside")
                with mutex:
                    inside[number] -= 1
                passed.leave()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    raised = 0
    while raised < 300:
        for number in range(4):
            raised += file.revoke(number) is Revoked.IDLE
    ended.set()
    for thread in threads:
        thread.join()
    key.close()
    assert (wrong, any(inside)) == ([], False)


class Machine(RuleBasedStateMachine):
    """Two writers with keys of their own and one owner, against a model that knows who is inside."""

    numbers = st.integers(0, 2)
    writers = st.integers(0, 1)

    def __init__(self):
        super().__init__()
        self.file = LockFile(3)
        self.keys = [PeerGate(self.file.handle), PeerGate(self.file.handle)]
        self.generations = dict.fromkeys(range(3), FIRST_GENERATION)
        self.inside = []

    @rule(number=numbers, writer=writers, older=st.integers(0, 1))
    def enter(self, number, writer, older):
        granted = self.generations[number] - older
        if any(one == number and other != writer for other, one, _ in self.inside):
            return  # a gate is of one transfer, so only one writer is granted it
        passed = enter(Permit(self.keys[writer], number, granted))
        assert (passed is not None) is (older == 0)
        if passed:
            self.inside.append((writer, number, passed))

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 100))
    def leave(self, which):
        _, _, passed = self.inside.pop(which % len(self.inside))
        passed.leave()

    @rule(number=numbers)
    def revoke(self, number):
        found = self.file.revoke(number)
        if any(one == number for _, one, _ in self.inside):
            assert found is None
        else:
            assert found is Revoked.IDLE
            self.generations[number] += 1

    @rule(writer=writers)
    def die(self, writer):
        """Its descriptor goes, as with its process; what it was inside of is found so, once."""
        key = self.keys[writer]
        key._words.release()
        key._pages.close()
        os.close(key._descriptor)
        mine = {number for other, number, _ in self.inside if other == writer}
        self.inside = [entry for entry in self.inside if entry[0] != writer]
        for number in mine:
            assert self.file.revoke(number) is Revoked.DIED
            self.generations[number] += 1
        self.keys[writer] = PeerGate(self.file.handle)

    @invariant()
    def generations_agree(self):
        assert all(self.file.words[2 * gate] + FIRST_GENERATION == raised for gate, raised in self.generations.items())

    def teardown(self):
        for _, _, passed in self.inside:
            passed.leave()
        for key in self.keys:
            key.close()
        self.file.close()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase


class Inside:
    """What another process is, or has been."""

    def __init__(self, handle, number):
        self._passed = enter(Permit(PeerGate(handle), number, FIRST_GENERATION))

    def leave(self):
        assert self._passed is not None
        self._passed.leave()

    def is_inside(self):
        return self._passed is not None


@pytest.fixture
def writer(file):
    writer = Away(Inside, file.handle, 3)
    assert writer.is_inside()
    yield writer
    writer.end()


def test_a_process_that_is_killed_inside_is_found_to_have_died_there(file, writer):
    assert file.revoke(3) is None
    os.kill(writer.process.pid, signal.SIGSTOP)
    assert file.revoke(3) is None  # for as long as it is stopped
    writer.kill()
    assert file.revoke(3) is Revoked.DIED
    assert file.revoke(3) is Revoked.IDLE


def test_a_process_that_is_stopped_outside_does_not_get_in_afterwards(file, writer):
    writer.leave()
    os.kill(writer.process.pid, signal.SIGSTOP)
    assert file.revoke(3) is Revoked.IDLE
    os.kill(writer.process.pid, signal.SIGCONT)
    assert not enter(Permit(PeerGate(file.handle), 3, FIRST_GENERATION))


def test_a_process_that_dies_outside_leaves_nothing(file, writer):
    writer.leave()
    writer.kill()
    assert file.revoke(3) is Revoked.IDLE
