"""The mover's machine: what moves bytes, as compiled code that needs no interpreter.

It owns a copy from the record that begins it to the event that tells how it ended. `step` does what is ready, never
waits, and says when it wants to run again; `run` is the thread: step, then sleep in `ppoll` until then or until a
record comes. Everything outside is reached through `ports`, a table of C function addresses, so tests put stubs into it
and drive the very code that ships.

    step of a flow --its events have fired-->  WAITING --its turn-->  RUNNING --everything has ended-->  ENDED
                                                  |                      |                                 |
                                                  +-----cancelled, past its lease, kept out---> ENDED   counted -> FREE

What comes through the pipe is a flow: copies that follow one another, or one alone. Its steps lie in the loop's memory
as records, and the machine feeds itself with them, in their order, as far as the loop has allowed: each gets a row when
its events have fired, and gives it back when it is done. The loop is told how many are, and once how the flow ended.
The first step that fails stops the rest.

Two flows, one that fills places in the memory of a peer and the peer's own that empties them, take turns: each tells
the other how many of its steps are done, by a notification over the transport. No loop has a part in that.

What decides whether a copy may begin (its lease, the lock in front of a peer's memory) is looked at in the lines right
before it does, by the one thread that could begin it. A lock is kept until nothing of its copies is under way.

All numbers are int64. `state` holds what belongs to the mover as a whole, a row of `jobs` one copy; `records.py` names
their words. Nothing here allocates or raises: memory comes from the loop, which keeps it until the event, and an
error is a code in that.
"""

# pyright: basic

from typing import Any, Final

from kvxfer.copy import records as r
from kvxfer.copy.compiler import (
    add,
    call,
    call_long,
    call_variadic,
    clear_bytes,
    compiled,
    copy_bytes,
    exchange,
    inlined,
    load,
    load_word,
    store,
    store_word,
)
from kvxfer.copy.posts import (
    begin_part,
    cut_off,
    drop_parts,
    enter_agent,
    give_back,
    leave_agent,
    look_at_parts,
    look_late,
    make_progress,
    next_post,
    notify_peer,
    prepare_part,
    settle,
)
from kvxfer.copy.walk import copy_part

__all__ = ["run", "step"]

_NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY
_READ_LOCK, _UNLOCK, _SET_LOCK = 0, 2, 37  # F_RDLCK, F_UNLCK, F_OFD_SETLK
_FIRST_GENERATION: Final = 1
_AHEAD_BYTES: Final = 512 << 20
"""Bytes that are launched ahead on a GPU, by two copies at least: more than a millisecond of the fastest."""
_SHORTEST_NS: Final = 20_000
_LOOK_BACK_NS: Final = 10_000_000
"""Between two looks at what was given up: over TCP it goes on in these alone."""
_GROWTH: Final = 1_000
"""Where the library may need this side to go on, a sleep is at most this fraction of the wait, but may be `OFTEN`."""
_LONGEST_STEP_NS: Final = 1_000_000_000
"""What one step counts towards a time-out at most: a stopped or starved process must not doubt its peers."""
_FOREVER: Final = -1
_PASSED: Final = -1
"""In place of the kind of a record: its step is done, but not all before it are."""


@inlined
def _now(state: Any, ports: Any) -> Any:
    """Monotonic nanoseconds."""
    if state[r.FIXED]:
        return state[r.NOW]
    call(ports[r.CLOCK_GETTIME], 1, state[r.HERE] + 8 * r.TIME)
    return state[r.TIME] * 1_000_000_000 + state[r.TIME + 1]


# --- what ends a copy


@inlined
def _lock(state: Any, ports: Any, job: Any, kind: Any) -> Any:
    """Take or give back the lock of a gate, without waiting. False if somebody else has it."""
    at = state[r.HERE] + 8 * r.LOCKED
    store(at, kind)  # struct flock: type, whence (from the start), start, length, process (0)
    store(at + 8, job[r.LOCK_BYTE])
    store(at + 16, 1)
    store(at + 24, 0)
    return call_variadic(ports[r.FCNTL], job[r.LOCK], _SET_LOCK, at) == 0


@inlined
def _enter(state: Any, ports: Any, job: Any) -> Any:
    """Pass the gate in front of the memory that is written. False if the grant was taken back, or somebody is at it."""
    if job[r.LOCK] < 0:
        return True
    inside = load(job[r.LOCK_USERS])
    if inside == 0 and not _lock(state, ports, job, _READ_LOCK):
        return False
    if load_word(job[r.LOCK_WORDS], 4) + _FIRST_GENERATION != job[r.GENERATION]:
        if inside == 0:
            _lock(state, ports, job, _UNLOCK)
        return False
    store(job[r.LOCK_USERS], inside + 1)
    store_word(job[r.LOCK_WORDS] + 4, 1, 4)
    job[r.ENTERED] = 1
    return True


@inlined
def _leave(state: Any, ports: Any, job: Any) -> None:
    """Nothing of a copy is under way any more."""
    if job[r.ENTERED]:
        job[r.ENTERED] = 0
        inside = load(job[r.LOCK_USERS]) - 1
        store(job[r.LOCK_USERS], inside)
        if inside == 0:
            store_word(job[r.LOCK_WORDS] + 4, 0, 4)
            _lock(state, ports, job, _UNLOCK)


@inlined
def _end(state: Any, jobs: Any, ports: Any, slot: Any, outcome: Any, now: Any) -> None:
    """A copy is over, and with it all but what is posted then."""
    job = jobs[slot]
    if job[r.STARTED] == 0:
        job[r.STARTED] = now
    if job[r.STATE] == r.SENDING:
        state[r.SENDING_COUNT] -= 1
    else:
        job[r.COPIED] = now
        if job[r.POST] != 0 and outcome == r.DONE:
            job[r.STATE], state[r.STIRRED] = r.SENDING, 1
            state[r.SENDING_COUNT] += 1
            state[r.SERVES] += 1
            job[r.SERVED] = state[r.SERVES]
            return
    # what was read from a peer that is gone brings nothing any more; what was written may still be under way to it
    if outcome != r.IN_DOUBT or (job[r.POST] == r.READS and job[r.LINGERS] == 0):
        _leave(state, ports, job)
    job[r.STATE], job[r.OUTCOME], job[r.FINISHED] = r.ENDED, outcome, now
    _owe(state, slot)


@inlined
def _owe(state: Any, slot: Any) -> None:
    """Its event is owed."""
    state[r.STIRRED] = 1
    state[r.DUE + (state[r.DUE_FIRST] + state[r.DUE_COUNT]) % r.ROWS] = slot
    state[r.DUE_COUNT] += 1


@inlined
def _tell(state: Any, jobs: Any, ports: Any) -> None:
    """Write the events that are owed, as far as the pipe takes them."""
    while state[r.DUE_COUNT] > 0:
        slot = state[r.DUE + state[r.DUE_FIRST]]
        job = jobs[slot]
        flow, ended = slot < r.JOBS, job[r.STATE] == r.ENDED
        stays = job[r.OUTCOME] != r.OVER and (job[r.LINGERS] != 0 or job[r.ENTERED] != 0)  # what it may move, or keeps
        stays = stays and not flow
        if flow or job[r.OUTCOME] >= r.IN_DOUBT:
            state[r.OUT], state[r.OUT + 2], state[r.OUT + 7] = slot, job[r.CODE], job[r.POSTING]
            flags = (job[r.GONE] != 0) * r.IS_GONE | (job[r.LINGERS] != 0) * r.IS_LINGERING | stays * r.IS_LEFT
            state[r.OUT + 1] = job[r.OUTCOME] | flags
            state[r.OUT + 3], state[r.OUT + 4] = job[r.STARTED], job[r.COPIED]
            state[r.OUT + 5], state[r.OUT + 6] = job[r.FIRST_POST], job[r.FINISHED]
            if flow:
                state[r.OUT + 1] = (job[r.OUTCOME] | flags if ended else r.PASSING) | r.COUNTED * job[r.PASSED]
                state[r.OUT + 4], state[r.OUT + 6] = job[r.COPYING], job[r.WIRED]
            else:
                state[r.OUT + 3] = job[r.OF_FLOW] - 1
            # before: who reads it may look at the row of what takes its place
            started, job[r.STARTED] = job[r.STARTED], 0
            size = 8 * r.EVENT_WORDS
            if call_long(ports[r.WRITE], state[r.NEWS], state[r.HERE] + 8 * r.OUT, size) != size:
                job[r.STARTED] = started
                return
            if not flow or not ended:
                job[r.STARTED] = started
        state[r.DUE_FIRST] = (state[r.DUE_FIRST] + 1) % r.ROWS
        state[r.DUE_COUNT] -= 1
        if not flow and job[r.OUTCOME] <= r.IN_DOUBT:
            _end_step(state, ports, jobs[job[r.OF_FLOW] - 1], job)
            _end_flow(state, jobs[job[r.OF_FLOW] - 1], job[r.OF_FLOW] - 1)
        if flow and not ended:
            job[r.MARKED], job[r.TOLD] = 0, job[r.PASSED]
            _end_flow(state, job, slot)  # it waited for that alone if it was stopped meanwhile
        elif stays:
            job[r.STATE] = r.LEFT
        else:
            _free(state, job, slot)
    if state[r.CATCHING] == 2:  # behind all else that the agent which is given up has said of peers
        state[r.OUT] = r.NOBODY
        if call_long(ports[r.WRITE], state[r.NEWS], state[r.HERE] + 8 * r.OUT, 8 * r.EVENT_WORDS) == 8 * r.EVENT_WORDS:
            state[r.CATCHING] = 0


@inlined
def _free(state: Any, job: Any, slot: Any) -> None:
    job[r.STATE] = r.FREE
    if slot >= r.JOBS:
        state[r.SPARE + state[r.SPARE_COUNT]] = slot
        state[r.SPARE_COUNT] += 1
        state[r.POSTED + job[r.PEER_NUMBER]] -= job[r.POST] != 0
    state[r.LIVE] -= 1
    at = 0
    while state[r.LISTED + at] != slot:
        at += 1
    for rest in range(at, state[r.LIVE]):  # they stay in the order in which they came
        state[r.LISTED + rest] = state[r.LISTED + rest + 1]


# --- flows


@inlined
def _step_at(flow: Any, step: Any) -> Any:
    return flow[r.STEPS_AT] + 8 * r.RECORD_WORDS * (step % flow[r.STEPS_ROOM])


@inlined
def _end_flow(state: Any, flow: Any, slot: Any) -> None:
    """End a flow that is through, or of which nothing begins any more, once nothing of it is under way."""
    whole = flow[r.PASSED] >= flow[r.TOTAL]
    if (whole or flow[r.CANCELLED] != 0) and flow[r.ACTIVE] == 0 and flow[r.MARKED] == 0:
        flow[r.STATE], flow[r.OUTCOME] = r.ENDED, r.DONE if whole else max(flow[r.VERDICT], r.STOPPED)
        state[r.FLOW_COUNT] -= 1
        state[r.LISTENING] -= flow[r.TOKEN] != 0
        _owe(state, slot)


@inlined
def _end_step(state: Any, ports: Any, flow: Any, job: Any) -> None:
    """A step of a flow has ended: count it, and tell the peer, or stop the rest."""
    state[r.STIRRED] = 1  # also if this waited behind news that the pipe has just taken
    flow[r.ACTIVE] -= 1
    if flow[r.STARTED] == 0:
        flow[r.STARTED] = job[r.STARTED]
    flow[r.COPYING] += job[r.COPIED] - job[r.STARTED]
    if job[r.FIRST_POST] != 0:
        if flow[r.FIRST_POST] == 0:
            flow[r.FIRST_POST] = job[r.FIRST_POST]
        flow[r.POSTING] += job[r.POSTING]
        flow[r.WIRED] += max(0, job[r.FINISHED] - max(job[r.FIRST_POST], flow[r.WIRED_TO]))
        flow[r.WIRED_TO] = max(flow[r.WIRED_TO], job[r.FINISHED])
    if job[r.OUTCOME] != r.DONE:
        _fail_flow(flow, job[r.OUTCOME], job[r.CODE], job[r.GONE], job[r.LINGERS])
        return
    store(_step_at(flow, job[r.STEP]), _PASSED)
    while flow[r.PASSED] < flow[r.NEXT] and load(_step_at(flow, flow[r.PASSED])) == _PASSED:
        flow[r.PASSED] += 1
    if _owes(flow) and enter_agent(state):  # else, as somebody else calls it, later, or by the loops if it is the last
        notify_peer(state, ports, flow)
        leave_agent(state)


@inlined
def _is_news(flow: Any, ready: Any, now: Any) -> Any:
    """Whether the loop is to be told how far a flow is: half of what may begin is done, it stands, or a while is over.

    News of one step costs the loop as much as of many. Where movers tell each other of turns a flow stands between any
    two steps, so that alone is no news. Once all may begin the loop is needed only where loops tell of turns.
    """
    needed = ready < flow[r.TOTAL] or (flow[r.PLACES] != 0 and flow[r.TOKEN] == 0)
    half = 2 * (flow[r.PASSED] - flow[r.TOLD]) >= ready - flow[r.TOLD] and needed
    return half or (flow[r.QUIET] <= r.SOON_NS and flow[r.ACTIVE] == 0) or now - flow[r.TOLD_AT] >= flow[r.QUIET]


@inlined
def _may_begin_of(flow: Any) -> Any:
    """How many steps of a flow may begin: what is gathered goes where there is a place, what is scattered has come."""
    most = min(flow[r.KNOWN], flow[r.ALLOWED])
    if flow[r.PLACES] != 0 and flow[r.LANE] == 0:
        most = min(most, min(flow[r.HEARD], flow[r.PASSED]) + flow[r.PLACES])
    elif flow[r.PLACES] != 0:
        most = min(most, flow[r.HEARD], flow[r.PASSED] + flow[r.PLACES])
    return most


@inlined
def _owes(flow: Any) -> Any:
    """Whether the peer is to be told that more steps are done. Of what is scattered last nobody waits for the place."""
    return (
        flow[r.TOKEN] != 0 and flow[r.SAID] < flow[r.PASSED] and (flow[r.LANE] == 0 or flow[r.PASSED] < flow[r.TOTAL])
    )


@inlined
def _fail_flow(flow: Any, outcome: Any, code: Any, gone: Any, lingers: Any) -> None:
    """A step did not succeed: none begins any more."""
    flow[r.LINGERS] |= lingers
    if flow[r.CANCELLED] == 0:
        flow[r.CANCELLED] = 1
    if outcome > flow[r.VERDICT]:
        flow[r.VERDICT], flow[r.CODE], flow[r.GONE] = outcome, code, gone


@inlined
def _fired(state: Any, ports: Any, flow: Any) -> Any:
    """Whether all events of the step to be fed have; 1, 0, or the code of an error as a negative number."""
    while flow[r.FIRED] < state[r.FEED + r.EVENT_COUNT]:
        code = call(ports[r.QUERY], load(state[r.FEED + r.EVENTS] + 8 * flow[r.FIRED]))
        if code == _NOT_READY:
            return 0
        if code != 0:
            return -code
        flow[r.FIRED] += 1
    return 1


@inlined
def _feed(state: Any, jobs: Any, ports: Any, slot: Any) -> None:
    """Give rows to the steps of a flow that may begin."""
    flow = jobs[slot]
    while flow[r.NEXT] < _may_begin_of(flow):
        if flow[r.NEXT] - flow[r.PASSED] >= flow[r.WIDTH]:
            return
        at = state[r.HERE] + 8 * r.FEED
        copy_bytes(at, _step_at(flow, flow[r.NEXT]), 8 * r.RECORD_WORDS)
        peer, posts = r.POSTED + flow[r.PEER_NUMBER], state[r.FEED + r.POST] != 0
        spare = state[r.SPARE_COUNT] - (r.KEPT if posts else 0)
        if spare <= 0 or (posts and state[peer] >= r.GREED * spare):
            return
        fired = _fired(state, ports, flow)
        if fired < 0:
            _fail_flow(flow, r.FAILED, -fired, 0, 0)
        if fired <= 0:
            return
        for word in range(r.LANE, r.OWNER + 1):
            state[r.FEED + word] = flow[word]
        state[r.FEED + r.UNTIL] = min(state[r.FEED + r.UNTIL], flow[r.UNTIL])
        for word in range(r.LOCK, r.LOCK_USERS + 1):
            state[r.FEED + word] = flow[word]
        state[r.FEED + r.PEER_NUMBER], state[r.FEED + r.OF_FLOW] = flow[r.PEER_NUMBER], slot + 1
        flow[r.FIRED] = 0
        state[r.SPARE_COUNT] -= 1
        free = state[r.SPARE + state[r.SPARE_COUNT]]
        _fill_row(state, jobs[free], r.FEED, free, r.WAITING)
        jobs[free][r.STEP] = flow[r.NEXT]
        flow[r.NEXT] += 1
        flow[r.ACTIVE] += 1
        state[peer] += posts
        state[r.STIRRED] = 1


@inlined
def _stop_steps(state: Any, jobs: Any, ports: Any, slot: Any, now: Any) -> None:
    """Stop what is under way of a flow, as far as it can be."""
    for at in range(state[r.LIVE]):
        number = state[r.LISTED + at]
        job = jobs[number]
        if job[r.OF_FLOW] == slot + 1:
            if job[r.STATE] == r.WAITING or job[r.STATE] == r.OFF:
                _end(state, jobs, ports, number, r.STOPPED, now)
            elif job[r.CANCELLED] == 0:
                job[r.CANCELLED] = 1


@inlined
def _step_flows(state: Any, jobs: Any, ports: Any, now: Any) -> None:
    """Begin steps, stop those of flows that are stopped, and end flows."""
    for at in range(state[r.LIVE]):
        slot = state[r.LISTED + at]
        flow = jobs[slot]
        if flow[r.KIND] != r.FLOW or (flow[r.STATE] != r.FLOWS and flow[r.STATE] != r.OFF):
            continue
        if flow[r.CANCELLED] == 1:
            flow[r.CANCELLED] = 2
            _stop_steps(state, jobs, ports, slot, now)
        row = state[r.ROWS_AT] + 8 * (slot * r.JOB_WORDS + r.STATE)
        if flow[r.CANCELLED] == 0 and flow[r.NEXT] < _may_begin_of(flow) and exchange(row, r.FLOWS, r.FEEDING):
            _feed(state, jobs, ports, slot)
            exchange(row, r.FEEDING, r.FLOWS)
        ready = min(flow[r.KNOWN], flow[r.ALLOWED]) if flow[r.TOKEN] != 0 else _may_begin_of(flow)
        if flow[r.ACTIVE] != 0 or (flow[r.CANCELLED] == 0 and flow[r.NEXT] < ready):
            state[r.EAGER] += 1
        more = flow[r.TOLD] < flow[r.PASSED] < flow[r.TOTAL]
        if more and flow[r.MARKED] == 0 and _is_news(flow, ready, now):
            flow[r.MARKED], flow[r.TOLD_AT] = 1, now
            _owe(state, slot)
        _end_flow(state, flow, slot)


# --- what begins one


@inlined
def _fill_row(state: Any, job: Any, at: Any, slot: Any, begins: Any) -> None:
    """Take a copy, or a flow, whose record lies there; it begins in that state."""
    owner, peer = state[at + r.OWNER], state[at + r.PEER_NUMBER]
    known = -r.MOST_OWNERS <= owner < r.MOST_OWNERS and -r.MOST_OWNERS <= peer < r.MOST_OWNERS
    if job[r.STATE] != r.FREE or not known:
        return
    for word in range(r.RECORD_WORDS):
        job[word] = state[at + word]
    for word in range(r.RECORD_WORDS, r.JOB_WORDS):
        job[word] = 0
    job[r.STATE], job[r.TAG] = begins, -1
    if begins == r.FLOWS:
        state[r.FLOW_COUNT] += 1
        state[r.LISTENING] += job[r.TOKEN] != 0
    if owner < 0:
        job[r.OWNER] = ~owner
        state[r.TAGS + ~owner] = 0
    if peer < 0:
        job[r.PEER_NUMBER] = ~peer
        state[r.TAGS + ~peer] = 0
    state[r.LISTED + state[r.LIVE]] = slot
    state[r.LIVE] += 1


@inlined
def _extend_flow(state: Any, jobs: Any, at: Any, slot: Any) -> None:
    """The loop says anew how far a flow may go, and until when."""
    flow = jobs[slot]
    for word in range(r.KNOWN, r.QUIET + 1):
        flow[word] = state[at + word]
    flow[r.HEARD] = max(flow[r.HEARD], state[at + r.HEARD])
    if flow[r.UNTIL] != state[at + r.UNTIL]:
        flow[r.UNTIL] = state[at + r.UNTIL]
        for number in range(state[r.LIVE]):
            job = jobs[state[r.LISTED + number]]
            if job[r.OF_FLOW] == slot + 1:
                job[r.UNTIL] = min(load(_step_at(flow, job[r.STEP]) + 8 * r.UNTIL), flow[r.UNTIL])


@inlined
def _end_left(state: Any, job: Any, slot: Any, outcome: Any, code: Any) -> None:
    """More is known of what is left of a post: no byte of this side is moved by it any more."""
    job[r.LINGERS] = 0
    job[r.STATE], job[r.OUTCOME], job[r.CODE] = r.ENDED, outcome, code
    _owe(state, slot)


@inlined
def _forget(state: Any, ports: Any, job: Any, slot: Any, finished: Any) -> None:
    """Nobody asks any more for what is left of a post; by when that ended, since another's may be in its row by now."""
    if job[r.FINISHED] != finished:
        return
    if job[r.STATE] == r.LEFT and job[r.FLYING] != 0:
        job[r.CANCELLED] = r.FORGOTTEN  # its parts are given back where the agent is called
    elif job[r.STATE] == r.LEFT:
        _leave(state, ports, job)
        _end_left(state, job, slot, r.OVER, 0)
    elif job[r.STATE] == r.ENDED and job[r.OUTCOME] == r.SEVERED:
        _leave(state, ports, job)


@inlined
def _replace_agent(state: Any, jobs: Any, ports: Any, at: Any, now: Any) -> None:
    """There is another agent, or the same one goes on, or there is none any more."""
    state[r.AGENT_AT], state[r.NOTICES_AT], anew = state[at + 1], state[at + 2], state[at + 3]
    state[r.HALTED] = 0
    for number in range(state[r.LIVE]):
        slot = state[r.LISTED + number]
        job = jobs[slot]
        ended = anew != 0 and job[r.STAYS] == 0  # but for what goes on without an agent
        if anew != 0 and job[r.GONE] != 0 and job[r.OUTCOME] <= r.IN_DOUBT:
            job[r.CODE] = r.CUT_OFF  # whatever was to be said of its peer: that is met again
        if job[r.KIND] == r.FLOW:
            continue
        if job[r.STATE] == r.SENDING and job[r.CUT] != 0:
            if ended:
                job[r.LINGERS], job[r.GONE], job[r.CODE] = 0, 1, r.CUT_OFF
            _end(state, jobs, ports, slot, r.IN_DOUBT, now)
        elif job[r.STATE] == r.ENDED and job[r.OUTCOME] == r.IN_DOUBT and ended:  # nobody knows yet
            job[r.LINGERS], job[r.GONE], job[r.CODE] = 0, 1, r.CUT_OFF
            if job[r.POST] == r.READS:
                _leave(state, ports, job)
        elif job[r.STATE] == r.LEFT and job[r.LINGERS] != 0 and ended:
            if job[r.POST] == r.READS:
                _leave(state, ports, job)
            _end_left(state, job, slot, r.SEVERED, 0)


@inlined
def _read_records(state: Any, jobs: Any, ports: Any, now: Any) -> None:
    """Take what has come through the pipe."""
    while True:
        got = call_long(
            ports[r.READ], state[r.COMMANDS], state[r.HERE] + 8 * r.INBOX, 8 * r.INBOX_RECORDS * r.RECORD_WORDS
        )
        for number in range(max(0, got) // (8 * r.RECORD_WORDS)):
            at = r.INBOX + number * r.RECORD_WORDS
            kind, slot = state[at], state[at + r.SLOT]
            if kind == r.STOP:
                state[r.STOPPING] = 1
            elif kind == r.HALT:
                state[r.HALTED] = 1
            elif kind == r.CATCH:
                state[r.CATCHING] = 1
            elif kind == r.AGENT:
                _replace_agent(state, jobs, ports, at, now)
            elif kind == r.FORGET and 0 <= slot < r.ROWS:
                _forget(state, ports, jobs[slot], slot, state[at + 2])
            elif 0 <= slot < r.JOBS:
                job = jobs[slot]
                if kind == r.FLOW:
                    _fill_row(state, job, at, slot, r.FLOWS)
                elif kind == r.ON and job[r.STATE] == r.FLOWS:
                    _extend_flow(state, jobs, at, slot)
                elif kind == r.CANCEL and job[r.CANCELLED] == 0 and job[r.STATE] != r.FREE:
                    job[r.CANCELLED] = 1
            state[r.STIRRED] = 1
        if got < 8 * r.INBOX_RECORDS * r.RECORD_WORDS:
            return


@inlined
def _may_begin(state: Any, jobs: Any, ports: Any, slot: Any, now: Any) -> Any:
    """Whether a copy begins: its lease has not ended, and nobody keeps it out. Else it is over."""
    job = jobs[slot]
    if now >= job[r.UNTIL] or (job[r.POST] == 0 and not _enter(state, ports, job)):
        _end(state, jobs, ports, slot, r.STOPPED, now)
        return False
    # before it is launched: a call that does that may stand still itself
    if not exchange(state[r.ROWS_AT] + 8 * (slot * r.JOB_WORDS + r.STATE), r.WAITING, r.RUNNING):
        _leave(state, ports, job)
        return False
    job[r.STARTED] = now
    return True


@inlined
def _next(state: Any, jobs: Any, ports: Any, lane: Any, now: Any) -> Any:
    """The slot whose turn it is in a direction, or in any if that is -1; -1 if none is ready.

    Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the smallest tag, and of equal ones the smaller copy.
    """
    best = -1
    for at in range(state[r.LIVE]):
        slot = state[r.LISTED + at]
        job = jobs[slot]
        if job[r.STATE] != r.WAITING or (lane >= 0 and job[r.LANE] != lane):
            continue
        if job[r.TAG] < 0:
            # what is only to be posted, or waited for its events
            if job[r.PART_COUNT] + job[r.BLANK_COUNT] + job[r.FLUSHED] == 0:
                if _may_begin(state, jobs, ports, slot, now):
                    _end(state, jobs, ports, slot, r.DONE, now)
                continue
            # behind the last one of its owner, and not before what is copied now: waiting has gained it nothing
            job[r.TAG] = max(state[r.TURN], state[r.TAGS + job[r.OWNER]])
            state[r.TAGS + job[r.OWNER]] = job[r.TAG] + max(1, job[r.BYTES])
        if best < 0 or (job[r.TAG], job[r.BYTES]) < (jobs[best][r.TAG], jobs[best][r.BYTES]):
            best = slot
    return best


@inlined
def _advance_turn(state: Any, job: Any) -> None:
    """A copy has its turn: time goes on by its bytes over all owners, so that no owner is passed for ever."""
    owners = max(1, state[r.OWNERS])
    state[r.TURN] = max(state[r.TURN], job[r.TAG]) + (job[r.BYTES] + owners - 1) // owners


# --- on a CPU


@inlined
def _step_host(state: Any, jobs: Any, ports: Any, now: Any) -> None:
    """Copy a part of what is copied now, beside helpers who do the same."""
    team = state[r.HERE] + 8 * r.TEAM
    slot = state[r.CURRENT]
    following = _next(state, jobs, ports, -1, now)
    if slot < 0:
        slot = following
        if slot < 0:
            return
        job, state[r.STIRRED] = jobs[slot], 1
        _advance_turn(state, job)
        if not _may_begin(state, jobs, ports, slot, now):
            return
        state[r.CURRENT] = slot
        for number in range(job[r.BLANK_COUNT]):
            blank = job[r.BLANKS] + 32 * number
            for line in range(load(blank + 16)):
                clear_bytes(load(blank) + line * load(blank + 24), load(blank + 8))
        store(team + 8, 0)
        store(team + 16, job[r.PARTS])
        add(team, job[r.PART_COUNT])
        for _ in range(job[r.HELPERS]):
            call(ports[r.SEM_POST], load(team + 32))
    job = jobs[slot]
    if job[r.CANCELLED]:  # what nobody has taken is left alone
        left = add(team, 0)
        while left > 0 and not exchange(team, left, 0):
            left = add(team, 0)
        if left > 0:
            job[r.PART_COUNT] -= left
            job[r.CUT] = 1
    left = add(team, 0)
    if left > 0 and exchange(team, left, left - 1):
        copy_part(job[r.PARTS], left - 1)
        add(team + 8, 1)
    if left > 0:
        state[r.STIRRED] = 1
    if add(team, 0) == 0 and add(team + 8, 0) == job[r.PART_COUNT]:
        state[r.CURRENT] = -1
        _end(state, jobs, ports, slot, r.STOPPED if job[r.CUT] else r.DONE, _now(state, ports))


# --- on a GPU


@inlined
def _room(lane: Any, job: Any) -> Any:
    """Find room for a copy's tables in the ring of its direction; False until older ones have ended."""
    words = job[r.TABLE_WORDS] + 2  # the last one tells of a closed gate, and they begin at multiples of 16 bytes
    if job[r.OWN_HOST]:
        return True
    if lane[r.HEAD] == lane[r.TAIL]:  # nothing is in it
        lane[r.HEAD] = lane[r.TAIL] = 0
    size, words = lane[r.RING_WORDS], (words + 1) & ~1
    start = lane[r.TAIL] % size
    skipped = size - start if start + words > size else 0
    if lane[r.TAIL] + skipped + words - lane[r.HEAD] > size:
        return False
    job[r.ROOM_START], job[r.ROOM_END] = (start + skipped) % size, lane[r.TAIL] + skipped + words
    return True


@inlined
def _enqueue(state: Any, ports: Any, lane: Any, job: Any) -> Any:
    """Launch everything of a copy; 0, or the code of the call that failed. What came before that may run."""
    host, device = job[r.OWN_HOST], job[r.OWN_DEVICE]
    if host == 0:
        host, device = lane[r.RING_HOST] + 8 * job[r.ROOM_START], lane[r.RING_DEVICE] + 8 * job[r.ROOM_START]
    closed, words, stream = host + 8 * job[r.TABLE_WORDS], 8 * job[r.TABLE_WORDS], lane[r.STREAM]
    copy_bytes(host, job[r.TABLES], words)
    store(closed, 0)
    code, sums = 0, job[r.SUMS] != 0
    if not job[r.NEAR] and words:
        code = call(ports[r.UPLOAD], device, host, words, stream)
    if code == 0 and job[r.FLUSHED]:
        code = call(ports[r.FLUSH], 0, 100)  # of the current context, to its owner
    for number in range(job[r.BLANK_COUNT]):
        blank = job[r.BLANKS] + 32 * number
        if code == 0 and load(blank + 16) == 1:
            code = call(ports[r.CLEAR], load(blank), 0, load(blank + 8), stream)
        elif code == 0:
            code = call(
                ports[r.CLEAR_LINES], load(blank), load(blank + 24), 0, load(blank + 8), load(blank + 16), stream
            )
    for number in range(job[r.PART_COUNT]):
        one = job[r.PARTS] + 8 * r.LAUNCH_WORDS * number
        state[r.ARGUMENTS] = host if job[r.NEAR] else device
        state[r.ARGUMENTS + 1], state[r.ARGUMENTS + 2] = load(one + 24), load(one + 32)
        state[r.ARGUMENTS + 3] = job[r.SUMS_AT] if sums else job[r.GATE]
        state[r.ARGUMENTS + 4] = 0 if sums else job[r.GATE_GENERATION]
        state[r.ARGUMENTS + 5] = 0 if sums else closed
        if code == 0:
            blocks = min(job[r.CTAS], load(one + 40))
            at = state[r.HERE] + 8 * r.PARAMETERS
            code = call(ports[r.LAUNCH], load(one), blocks, 1, 1, load(one + 8), 1, 1, load(one + 16), stream, at, 0)
    if code == 0 and sums:
        first = 8 * job[r.SUMS_AT]
        code = call(ports[r.DOWNLOAD], host + first, device + first, words - first, stream)
    return code


@inlined
def _launch(state: Any, jobs: Any, ports: Any, lane: Any, slot: Any, now: Any) -> None:
    """Begin a copy for which there is room."""
    job, state[r.STIRRED] = jobs[slot], 1
    _advance_turn(state, job)
    if not _may_begin(state, jobs, ports, slot, now):
        return
    place = (lane[r.FIRST] + lane[r.COUNT]) % r.QUEUE
    lane[r.ORDER + place] = slot
    if not job[r.OWN_HOST]:
        lane[r.TAIL] = job[r.ROOM_END]
    lane[r.COUNT] += 1
    lane[r.UNDERWAY] += job[r.BYTES]
    job[r.CODE] = _enqueue(state, ports, lane, job)
    code = call(ports[r.RECORD], lane[r.ORDER + r.QUEUE + place], lane[r.STREAM])
    job[r.MARKED] = 1 if code == 0 else 0
    if job[r.CODE] == 0:
        job[r.CODE] = code


@inlined
def _reap(state: Any, jobs: Any, ports: Any, lane: Any) -> None:
    """End the copies of a direction that have run. They end in order, so only the oldest is asked for."""
    while lane[r.COUNT] > 0:
        place = lane[r.FIRST] % r.QUEUE
        slot = lane[r.ORDER + place]
        job = jobs[slot]
        if job[r.MARKED]:
            code = call(ports[r.QUERY], lane[r.ORDER + r.QUEUE + place])
            if code == _NOT_READY:
                return
            if job[r.CODE] == 0:
                job[r.CODE] = code
        now = _now(state, ports)
        host = job[r.OWN_HOST] or lane[r.RING_HOST] + 8 * job[r.ROOM_START]
        kept_out = job[r.GATE] != 0 and load(host + 8 * job[r.TABLE_WORDS]) != 0
        if job[r.SUMS] and job[r.CODE] == 0:
            copy_bytes(job[r.SUMS], host + 8 * job[r.SUMS_AT], 8 * (job[r.TABLE_WORDS] - job[r.SUMS_AT]))
        if not job[r.OWN_HOST]:
            lane[r.HEAD] = job[r.ROOM_END]
        lane[r.FIRST] = (place + 1) % r.QUEUE
        lane[r.COUNT] -= 1
        lane[r.UNDERWAY] -= job[r.BYTES]
        job[r.STARTED] = max(job[r.STARTED], lane[r.LAST_END])
        lane[r.LAST_END] = now
        _end(state, jobs, ports, slot, r.FAILED if job[r.CODE] else r.STOPPED if kept_out else r.DONE, now)


@inlined
def _step_gpu(state: Any, jobs: Any, ports: Any, now: Any) -> None:
    """Launch what is next in each direction, and end what has run.

    One at a time: a launch takes as long as many a copy, and what has ended meanwhile is waited for elsewhere.
    """
    for number in range(r.LANES):
        lane = state[r.LANE_AT + number * r.LANE_WORDS : r.LANE_AT + (number + 1) * r.LANE_WORDS]
        full = lane[r.COUNT] == r.QUEUE or (lane[r.COUNT] > 1 and lane[r.UNDERWAY] >= _AHEAD_BYTES)
        slot = _next(state, jobs, ports, number, now)
        if not full and slot >= 0 and _room(lane, jobs[slot]):
            _launch(state, jobs, ports, lane, slot, now)
        _reap(state, jobs, ports, lane)


# --- over the transport


@inlined
def _stop_cancelled(state: Any, jobs: Any, ports: Any, now: Any) -> None:
    """Post no more of what was cancelled; end what has nothing under way, also without an agent."""
    for at in range(state[r.LIVE]):
        slot = state[r.LISTED + at]
        job = jobs[slot]
        if (
            job[r.STATE] == r.SENDING
            and job[r.CANCELLED] != 0
            and job[r.VERDICT] == r.DONE
            and job[r.PIECE] < job[r.PIECES]
        ):
            job[r.VERDICT] = r.STOPPED
            if job[r.FLYING] == 0:
                _end(state, jobs, ports, slot, r.STOPPED, now)


@inlined
def _step_posts(state: Any, jobs: Any, ports: Any, now: Any) -> None:  # noqa: PLR0912 - one pass, in order
    """Post a part, look at all that are under way, let the library work.

    One part at a time: where the call that posts it copies, it takes a while, and others have ended meanwhile.
    """
    if state[r.CATCHING] == 1 and state[r.AGENT_AT] == 0:
        state[r.CATCHING] = 2
    if state[r.SENDING_COUNT] + state[r.WATCHED] + state[r.HELD] + state[r.CATCHING] + state[r.LISTENING] == 0:
        return
    if state[r.SENDING_COUNT] != 0:
        _stop_cancelled(state, jobs, ports, now)
    if not enter_agent(state):
        return
    slot = -1 if state[r.HALTED] else next_post(state, jobs)
    if slot >= 0:
        _post(state, ports, jobs[slot])
    if state[r.SENDING_COUNT] != 0:
        now = _now(state, ports)
        for at in range(state[r.LIVE]):
            slot = state[r.LISTED + at]
            job = jobs[slot]
            if job[r.STATE] == r.SENDING and job[r.CUT] == 0:
                look_at_parts(state, ports, job)
                if settle(state, ports, job):
                    _end(state, jobs, ports, slot, job[r.VERDICT], now)
    # before the agent ends, too: what was forgotten then would not be seen again
    if state[r.WATCHED] != 0 and (now - state[r.LOOKED] >= _LOOK_BACK_NS or state[r.CATCHING] == 1):
        state[r.LOOKED] = now
        for at in range(state[r.LIVE]):
            slot = state[r.LISTED + at]
            job = jobs[slot]
            if job[r.STATE] == r.LEFT and job[r.FLYING] != 0:
                ended = look_late(state, ports, job)
                if ended or job[r.CANCELLED] == r.FORGOTTEN:
                    drop_parts(state, ports, job)
                    _leave(state, ports, job)
                    _end_left(state, job, slot, r.OVER, 1 if ended else 0)
    if state[r.LISTENING] != 0:
        for at in range(state[r.LIVE]):
            flow = jobs[state[r.LISTED + at]]
            if flow[r.KIND] == r.FLOW and flow[r.STATE] == r.FLOWS and _owes(flow):
                notify_peer(state, ports, flow)
    if state[r.HELD] + state[r.LISTENING] != 0:
        make_progress(state, jobs, ports)
    if state[r.CATCHING] == 1:
        for at in range(state[r.LIVE]):
            job = jobs[state[r.LISTED + at]]
            if job[r.STATE] == r.SENDING and cut_off(state, ports, job):
                job[r.CUT] = 1
            elif job[r.STATE] == r.LEFT or job[r.STATE] == r.ENDED:
                drop_parts(state, ports, job)
        state[r.CATCHING], state[r.AGENT_AT] = 2, 0  # whose end may be next: it is not called before there is one again
    leave_agent(state)


@inlined
def _post(state: Any, ports: Any, job: Any) -> None:
    """Post the next part of a post, unless it may not go on."""
    began, flush, state[r.STIRRED] = _now(state, ports), job[r.FLUSHING] == r.FLUSH_DUE, 1
    request = prepare_part(state, ports, job)
    if request == 0:
        return
    # a flush touches nothing that is not touched already
    if not flush and (_now(state, ports) >= job[r.UNTIL] or (job[r.ENTERED] == 0 and not _enter(state, ports, job))):
        give_back(state, ports, request)
        job[r.VERDICT] = r.STOPPED
        return
    begin_part(state, ports, job, request, began)
    if not flush:
        job[r.POSTING] += _now(state, ports) - began


# --- all of it


@inlined
def _delay(state: Any, now: Any) -> Any:
    """Nanoseconds until something may have to be done, where nothing moves on."""
    waited = now - state[r.SINCE]
    longest = state[r.SELDOM]
    often = min(max(waited // _GROWTH, state[r.OFTEN]), longest)  # where the library may need us to go on
    delay = _FOREVER
    if state[r.EAGER] + state[r.DUE_COUNT] > 0:
        if waited < state[r.SPIN]:
            return 0
        delay = min(max(waited // 32, _SHORTEST_NS), often if state[r.SENDING_COUNT] != 0 else longest)
    if state[r.HELD] + state[r.LISTENING] != 0:
        delay = often if delay < 0 else min(delay, often)
    if state[r.WATCHED] != 0:
        delay = _LOOK_BACK_NS if delay < 0 else min(delay, _LOOK_BACK_NS)
    if state[r.CATCHING] != 0:
        delay = _SHORTEST_NS
    state[r.ASLEEP] = 1 if delay < 0 else 0
    return delay


@compiled("int64(int64[::1], int64[:,::1], int64[::1])")
def step(state: Any, jobs: Any, ports: Any) -> Any:
    """Do what is ready.

    Returns:
        Nanoseconds after which it wants to run again, unless a record comes before; -1: then only.
    """
    now = _now(state, ports)
    if state[r.WANTED] == 0:  # else it cannot see what has ended
        state[r.LIVED] += min(now - state[r.STEPPED], _LONGEST_STEP_NS, state[r.PATIENCE] // 4)
    state[r.STEPPED], state[r.STIRRED], state[r.ASLEEP], state[r.EAGER] = now, 0, 0, 0
    _read_records(state, jobs, ports, now)
    # told to stop it calls nothing more: the agent that it knows may have ended by now
    if state[r.STOPPING] != 0 or state[r.LIVE] + state[r.HELD] + state[r.CATCHING] == 0:
        state[r.ASLEEP] = 1
        return _FOREVER
    if state[r.FLOW_COUNT] != 0:
        _step_flows(state, jobs, ports, now)
    if state[r.GPU]:
        _step_gpu(state, jobs, ports, now)
    else:
        _step_host(state, jobs, ports, now)
    _step_posts(state, jobs, ports, now)
    _tell(state, jobs, ports)
    if state[r.STIRRED] != 0:
        state[r.SINCE] = now
        return 0
    return _delay(state, now)


@compiled("void(int64[::1], int64[:,::1], int64[::1])")
def run(state: Any, jobs: Any, ports: Any) -> None:
    """Go on until a record says STOP: what a thread does."""
    if state[r.GPU]:
        call(ports[r.SET_CONTEXT], state[r.CONTEXT])
        state[r.TIME] = 2  # relaxed: what is asked here must not break what somebody else captures
        call(ports[r.CAPTURE_MODE], state[r.HERE] + 8 * r.TIME)
    state[r.POLLED] = state[r.COMMANDS] | 1 << 32  # struct pollfd: the descriptor, and POLLIN
    while True:
        delay = step(state, jobs, ports)
        if state[r.STOPPING]:
            return
        if delay != 0:
            state[r.TIME], state[r.TIME + 1] = 0, delay
            timeout = state[r.HERE] + 8 * r.TIME if delay > 0 else 0
            call(ports[r.PPOLL], state[r.HERE] + 8 * r.POLLED, 1, timeout, 0)
