"""The mover's machine: what moves bytes, as compiled code that needs no interpreter.

It owns a copy from the record that begins it to the event that tells how it ended. `step` does what is ready, never
waits, and says when it wants to run again; `run` is the thread: step, then sleep in `ppoll` until then or until a
record comes. Everything outside is reached through `ports`, a table of C function addresses, so tests put stubs into it
and drive the very code that ships.

    record   -> pipe ->   WAITING --its events have fired, its turn-->  RUNNING --everything has ended-->  ENDED
    (copy, cancel, stop)     |                                            |                                  |
                             +--cancelled, past its lease, kept out-------+-------> ENDED       event -> pipe -> FREE

A flow is copies that follow one another. Its steps lie in the loop's memory as records, and the machine feeds itself
with them, in their order, as far as the loop has allowed: each gets a row when its events have fired, and gives it back
when it is done. The loop is told how many are, and once how the flow ended. The first step that fails stops the rest.

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
    caught,
    drop_parts,
    ended_late,
    enter_agent,
    give_back,
    inform,
    leave_agent,
    look,
    make_progress,
    measured,
    prepared,
    settled,
    turn,
)
from kvxfer.copy.records import (
    ACTIVE,
    AGENT,
    AGENT_AT,
    ALLOWED,
    ARGUMENTS,
    ASLEEP,
    BLANK_COUNT,
    BLANKS,
    BYTES,
    CANCEL,
    CANCELLED,
    CAPTURE_MODE,
    CATCH,
    CATCHING,
    CLEAR,
    CLEAR_LINES,
    CLOCK_GETTIME,
    CODE,
    COMMANDS,
    CONTEXT,
    COPIED,
    COPY,
    COPYING,
    COUNT,
    COUNTED,
    CTAS,
    CURRENT,
    CUT,
    DONE,
    DOWNLOAD,
    DUE,
    DUE_COUNT,
    DUE_FIRST,
    EAGER,
    ENDED,
    ENTERED,
    EVENT_COUNT,
    EVENT_WORDS,
    EVENTS,
    FAILED,
    FCNTL,
    FEED,
    FEEDING,
    FINISHED,
    FIRED,
    FIRST,
    FIRST_POST,
    FIXED,
    FLOW,
    FLOW_COUNT,
    FLOWS,
    FLUSH,
    FLUSH_DUE,
    FLUSHED,
    FLUSHING,
    FLYING,
    FORGET,
    FORGOTTEN,
    FREE,
    GATE,
    GATE_GENERATION,
    GENERATION,
    GONE,
    GPU,
    HALT,
    HALTED,
    HEAD,
    HEARD,
    HELD,
    HELPERS,
    HERE,
    IN_DOUBT,
    INBOX,
    INBOX_RECORDS,
    IS_GONE,
    IS_LEFT,
    IS_LINGERING,
    JOB_WORDS,
    JOBS,
    KIND,
    KNOWN,
    LANE,
    LANE_AT,
    LANE_WORDS,
    LANES,
    LAST_END,
    LAUNCH,
    LAUNCH_WORDS,
    LEFT,
    LEFT_COUNT,
    LINGERING,
    LINGERS,
    LISTED,
    LISTENING,
    LIVE,
    LIVED,
    LOCK,
    LOCK_BYTE,
    LOCK_USERS,
    LOCK_WORDS,
    LOCKED,
    LOOKED,
    MARKED,
    MOST_OWNERS,
    NEAR,
    NEWS,
    NEXT,
    NOBODY,
    NOTICES_AT,
    NOW,
    OF_FLOW,
    OFF,
    OFTEN,
    ON,
    ORDER,
    OUT,
    OUTCOME,
    OVER,
    OWN_DEVICE,
    OWN_HOST,
    OWNER,
    OWNERS,
    PARAMETERS,
    PART_COUNT,
    PARTS,
    PASSED,
    PASSING,
    PATIENCE,
    PEER_NUMBER,
    PIECE,
    PIECES,
    PLACES,
    POLLED,
    POST,
    POSTING,
    PPOLL,
    QUERY,
    QUEUE,
    READ,
    READS,
    RECORD,
    RECORD_WORDS,
    RING_DEVICE,
    RING_HOST,
    RING_WORDS,
    ROOM_END,
    ROOM_START,
    ROWS,
    ROWS_AT,
    RUNNING,
    SAID,
    SELDOM,
    SEM_POST,
    SENDING,
    SENDING_COUNT,
    SERVED,
    SERVES,
    SET_CONTEXT,
    SEVERED,
    SINCE,
    SLOT,
    SPARE,
    SPARE_COUNT,
    SPIN,
    STARTED,
    STATE,
    STAYS,
    STEP,
    STEPPED,
    STEPS_AT,
    STEPS_ROOM,
    STIRRED,
    STOP,
    STOPPED,
    STOPPING,
    STREAM,
    SUMS,
    SUMS_AT,
    TABLE_WORDS,
    TABLES,
    TAG,
    TAGS,
    TAIL,
    TEAM,
    TIME,
    TOKEN,
    TOLD,
    TOTAL,
    TURN,
    TURNS,
    UNDERWAY,
    UNTIL,
    UPLOAD,
    VERDICT,
    WAITING,
    WANTED,
    WATCHED,
    WIDTH,
    WIRED,
    WIRED_TO,
    WRITE,
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
"""In place of the kind of a record: its step is done, and one before it is not."""


@inlined
def _now(state: Any, ports: Any) -> Any:
    """Monotonic nanoseconds."""
    if state[FIXED]:
        return state[NOW]
    call(ports[CLOCK_GETTIME], 1, state[HERE] + 8 * TIME)
    return state[TIME] * 1_000_000_000 + state[TIME + 1]


# --- what ends a copy


@inlined
def _lock(state: Any, ports: Any, job: Any, kind: Any) -> Any:
    """Take or give back the lock of a gate, without waiting. False if somebody else has it."""
    at = state[HERE] + 8 * LOCKED
    store(at, kind)  # struct flock: type, whence (from the start), start, length, process (0)
    store(at + 8, job[LOCK_BYTE])
    store(at + 16, 1)
    store(at + 24, 0)
    return call_variadic(ports[FCNTL], job[LOCK], _SET_LOCK, at) == 0


@inlined
def _enter(state: Any, ports: Any, job: Any) -> Any:
    """Pass the gate in front of the memory that is written. False if the grant was taken back, or somebody is at it."""
    if job[LOCK] < 0:
        return True
    inside = load(job[LOCK_USERS])
    if inside == 0 and not _lock(state, ports, job, _READ_LOCK):
        return False
    if load_word(job[LOCK_WORDS], 4) + _FIRST_GENERATION != job[GENERATION]:
        if inside == 0:
            _lock(state, ports, job, _UNLOCK)
        return False
    store(job[LOCK_USERS], inside + 1)
    store_word(job[LOCK_WORDS] + 4, 1, 4)
    job[ENTERED] = 1
    return True


@inlined
def _leave(state: Any, ports: Any, job: Any) -> None:
    """Nothing of a copy is under way any more."""
    if job[ENTERED]:
        job[ENTERED] = 0
        inside = load(job[LOCK_USERS]) - 1
        store(job[LOCK_USERS], inside)
        if inside == 0:
            store_word(job[LOCK_WORDS] + 4, 0, 4)
            _lock(state, ports, job, _UNLOCK)


@inlined
def _end(state: Any, jobs: Any, ports: Any, slot: Any, outcome: Any, now: Any) -> None:
    """A copy is over, and with it all but what is posted then."""
    job = jobs[slot]
    if job[STARTED] == 0:
        job[STARTED] = now
    if job[STATE] == SENDING:
        state[SENDING_COUNT] -= 1
    else:
        job[COPIED] = now
        if job[POST] != 0 and outcome == DONE:
            job[STATE], state[STIRRED] = SENDING, 1
            state[SENDING_COUNT] += 1
            state[SERVES] += 1
            job[SERVED] = state[SERVES]
            return
    # what was read from a peer that is gone brings nothing any more; what was written may still be under way to it
    if outcome != IN_DOUBT or (job[POST] == READS and job[LINGERS] == 0):
        _leave(state, ports, job)
    job[STATE], job[OUTCOME], job[FINISHED] = ENDED, outcome, now
    _owe(state, slot)


@inlined
def _owe(state: Any, slot: Any) -> None:
    """Its event is owed."""
    state[STIRRED] = 1
    state[DUE + (state[DUE_FIRST] + state[DUE_COUNT]) % ROWS] = slot
    state[DUE_COUNT] += 1


@inlined
def _tell(state: Any, jobs: Any, ports: Any) -> None:
    """Write the events that are owed, as far as the pipe takes them."""
    if state[CATCHING] == 2:
        state[OUT] = NOBODY
        if call_long(ports[WRITE], state[NEWS], state[HERE] + 8 * OUT, 8 * EVENT_WORDS) == 8 * EVENT_WORDS:
            state[CATCHING] = 0
    while state[DUE_COUNT] > 0:
        slot = state[DUE + state[DUE_FIRST]]
        job = jobs[slot]
        flow, ended = job[KIND] == FLOW, job[STATE] == ENDED
        stays = job[OUTCOME] != OVER and (job[LINGERS] != 0 or job[ENTERED] != 0)  # what it may move, or keeps
        stays = stays and not flow
        if slot < JOBS or job[OUTCOME] >= IN_DOUBT:
            state[OUT], state[OUT + 2], state[OUT + 7] = slot, job[CODE], job[POSTING]
            flags = (job[GONE] != 0) * IS_GONE | (job[LINGERS] != 0) * IS_LINGERING | stays * IS_LEFT
            state[OUT + 1] = job[OUTCOME] | flags
            state[OUT + 3], state[OUT + 4] = job[STARTED], job[COPIED]
            state[OUT + 5], state[OUT + 6] = job[FIRST_POST], job[FINISHED]
            if flow:
                state[OUT + 1] = (job[OUTCOME] | flags if ended else PASSING) | COUNTED * job[PASSED]
                state[OUT + 4], state[OUT + 6] = job[COPYING], job[WIRED]
            elif slot >= JOBS:
                state[OUT + 3] = job[OF_FLOW] - 1
            started, job[STARTED] = job[STARTED], 0  # before: who reads it may look at the row of what takes its place
            if call_long(ports[WRITE], state[NEWS], state[HERE] + 8 * OUT, 8 * EVENT_WORDS) != 8 * EVENT_WORDS:
                job[STARTED] = started
                return
            if slot >= JOBS or (flow and not ended):
                job[STARTED] = started
        state[DUE_FIRST] = (state[DUE_FIRST] + 1) % ROWS
        state[DUE_COUNT] -= 1
        if slot >= JOBS and job[OUTCOME] <= IN_DOUBT:
            _passed(state, ports, jobs[job[OF_FLOW] - 1], job, job[OF_FLOW] - 1)
        if flow and not ended:
            job[MARKED], job[TOLD] = 0, job[PASSED]
        elif stays:
            job[STATE] = LEFT
            state[LEFT_COUNT] += 1
            state[LINGERING] += job[LINGERS]
        else:
            _free(state, job, slot)


@inlined
def _free(state: Any, job: Any, slot: Any) -> None:
    """A row is free again."""
    job[STATE] = FREE
    if slot >= JOBS:
        state[SPARE + state[SPARE_COUNT]] = slot
        state[SPARE_COUNT] += 1
    state[LIVE] -= 1
    at = 0
    while state[LISTED + at] != slot:
        at += 1
    for rest in range(at, state[LIVE]):  # they stay in the order in which they came
        state[LISTED + rest] = state[LISTED + rest + 1]


# --- flows


@inlined
def _step_at(flow: Any, step: Any) -> Any:
    """Where the record of a step is."""
    return flow[STEPS_AT] + 8 * RECORD_WORDS * (step % flow[STEPS_ROOM])


@inlined
def _passed(state: Any, ports: Any, flow: Any, job: Any, slot: Any) -> None:
    """A step of a flow has ended: count it, and tell the peer, or stop the rest."""
    flow[ACTIVE] -= 1
    if flow[STARTED] == 0:
        flow[STARTED] = job[STARTED]
    flow[COPYING] += job[COPIED] - job[STARTED]
    if job[FIRST_POST] != 0:
        if flow[FIRST_POST] == 0:
            flow[FIRST_POST] = job[FIRST_POST]
        flow[POSTING] += job[POSTING]
        flow[WIRED] += max(0, job[FINISHED] - max(job[FIRST_POST], flow[WIRED_TO]))
        flow[WIRED_TO] = max(flow[WIRED_TO], job[FINISHED])
    if job[OUTCOME] != DONE:
        _spoilt(flow, job[OUTCOME], job[CODE], job[GONE], job[LINGERS])
        return
    store(_step_at(flow, job[STEP]), _PASSED)
    while flow[PASSED] < flow[NEXT] and load(_step_at(flow, flow[PASSED])) == _PASSED:
        flow[PASSED] += 1
    if _owes(flow) and enter_agent(state):  # else, as somebody else calls it, later, or by the loops if it is the last
        inform(state, ports, flow)
        leave_agent(state)
    if flow[PASSED] > flow[TOLD] and flow[PASSED] < flow[TOTAL] and flow[MARKED] == 0:
        flow[MARKED] = 1
        _owe(state, slot)


@inlined
def _may_begin_of(flow: Any) -> Any:
    """How many steps of a flow may begin: what is gathered goes where there is a place, what is scattered has come."""
    most = min(flow[KNOWN], flow[ALLOWED])
    if flow[PLACES] != 0 and flow[LANE] == 0:
        most = min(most, min(flow[HEARD], flow[PASSED]) + flow[PLACES])
    elif flow[PLACES] != 0:
        most = min(most, flow[HEARD], flow[PASSED] + flow[PLACES])
    return most


@inlined
def _owes(flow: Any) -> Any:
    """Whether the peer is to be told that more steps are done. Of what is scattered last nobody waits for the place."""
    return flow[TOKEN] != 0 and flow[SAID] < flow[PASSED] and (flow[LANE] == 0 or flow[PASSED] < flow[TOTAL])


@inlined
def _spoilt(flow: Any, outcome: Any, code: Any, gone: Any, lingers: Any) -> None:
    """A step did not succeed: none begins any more."""
    flow[LINGERS] |= lingers
    if flow[CANCELLED] == 0:
        flow[CANCELLED] = 1
    if outcome > flow[VERDICT]:
        flow[VERDICT], flow[CODE], flow[GONE] = outcome, code, gone


@inlined
def _feed(state: Any, jobs: Any, ports: Any, slot: Any, now: Any) -> Any:
    """Give rows to the steps of a flow that may begin; whether any got one."""
    flow, fed = jobs[slot], False
    while flow[NEXT] < _may_begin_of(flow):
        if flow[NEXT] - flow[PASSED] >= flow[WIDTH] or state[SPARE_COUNT] == 0:
            return fed
        at = state[HERE] + 8 * FEED
        copy_bytes(at, _step_at(flow, flow[NEXT]), 8 * RECORD_WORDS)
        flow[EVENTS], flow[EVENT_COUNT] = state[FEED + EVENTS], state[FEED + EVENT_COUNT]
        fired = _fired(ports, flow)
        if fired < 0:
            _spoilt(flow, FAILED, -fired, 0, 0)
        if fired <= 0:
            return fed
        for word in range(LANE, OWNER + 1):
            state[FEED + word] = flow[word]
        state[FEED + UNTIL] = min(state[FEED + UNTIL], flow[UNTIL])
        for word in range(LOCK, LOCK_USERS + 1):
            state[FEED + word] = flow[word]
        state[FEED + PEER_NUMBER], state[FEED + OF_FLOW] = flow[PEER_NUMBER], slot + 1
        state[FEED + EVENT_COUNT] = flow[FIRED] = 0
        state[SPARE_COUNT] -= 1
        free = state[SPARE + state[SPARE_COUNT]]
        _accept(state, jobs[free], FEED, free, WAITING)
        jobs[free][STEP] = flow[NEXT]
        flow[NEXT] += 1
        flow[ACTIVE] += 1
        fed = True
    return fed


@inlined
def _stop_steps(state: Any, jobs: Any, ports: Any, slot: Any, now: Any) -> None:
    """Stop what is under way of a flow, as far as it can be."""
    for at in range(state[LIVE]):
        number = state[LISTED + at]
        job = jobs[number]
        if job[OF_FLOW] == slot + 1 and number >= JOBS:
            if job[STATE] == WAITING or job[STATE] == OFF:
                _end(state, jobs, ports, number, STOPPED, now)
            elif job[CANCELLED] == 0:
                job[CANCELLED] = 1


@inlined
def _step_flows(state: Any, jobs: Any, ports: Any, now: Any) -> Any:
    """Begin steps, stop those of flows that are stopped, and end flows; whether anything moved on."""
    moved = False
    state[EAGER] = 0
    for at in range(state[LIVE]):
        slot = state[LISTED + at]
        flow = jobs[slot]
        if flow[KIND] != FLOW or (flow[STATE] != FLOWS and flow[STATE] != OFF):
            continue
        if flow[CANCELLED] == 1:
            flow[CANCELLED] = 2
            _stop_steps(state, jobs, ports, slot, now)
        row = state[ROWS_AT] + 8 * (slot * JOB_WORDS + STATE)
        if flow[CANCELLED] == 0 and flow[NEXT] < _may_begin_of(flow) and exchange(row, FLOWS, FEEDING):
            if _feed(state, jobs, ports, slot, now):
                moved = True
            exchange(row, FEEDING, FLOWS)
        ready = min(flow[KNOWN], flow[ALLOWED]) if flow[TOKEN] != 0 else _may_begin_of(flow)
        if flow[CANCELLED] == 0 and flow[NEXT] < ready:
            state[EAGER] += 1
        over = flow[CANCELLED] != 0 or flow[PASSED] >= flow[TOTAL]
        if over and flow[ACTIVE] == 0 and flow[MARKED] == 0:
            whole = flow[PASSED] >= flow[TOTAL]
            flow[STATE], flow[OUTCOME] = ENDED, DONE if whole else max(flow[VERDICT], STOPPED)
            state[FLOW_COUNT] -= 1
            state[LISTENING] -= flow[TOKEN] != 0
            _owe(state, slot)
    return moved


# --- what begins one


@inlined
def _accept(state: Any, job: Any, at: Any, slot: Any, begins: Any) -> None:
    """Take a copy, or a flow, whose record lies there; it begins in that state."""
    owner, peer = state[at + OWNER], state[at + PEER_NUMBER]
    known = -MOST_OWNERS <= owner < MOST_OWNERS and -MOST_OWNERS <= peer < MOST_OWNERS
    if job[STATE] != FREE or not known:
        return
    for word in range(RECORD_WORDS):
        job[word] = state[at + word]
    for word in range(RECORD_WORDS, JOB_WORDS):
        job[word] = 0
    job[STATE], job[TAG] = begins, -1
    if begins == FLOWS:
        state[FLOW_COUNT] += 1
        state[LISTENING] += job[TOKEN] != 0
    if owner < 0:
        job[OWNER] = ~owner
        state[TAGS + ~owner] = 0
    if peer < 0:
        job[PEER_NUMBER] = ~peer
        state[TAGS + ~peer] = 0
    state[LISTED + state[LIVE]] = slot
    state[LIVE] += 1


@inlined
def _goes_on(state: Any, jobs: Any, at: Any, slot: Any) -> None:
    """The loop says anew how far a flow may go, and until when."""
    flow = jobs[slot]
    for word in range(KNOWN, TOTAL + 1):
        flow[word] = state[at + word]
    flow[HEARD] = max(flow[HEARD], state[at + HEARD])
    if flow[UNTIL] != state[at + UNTIL]:
        flow[UNTIL] = state[at + UNTIL]
        for number in range(state[LIVE]):
            job = jobs[state[LISTED + number]]
            if job[OF_FLOW] == slot + 1:
                job[UNTIL] = min(load(_step_at(flow, job[STEP]) + 8 * UNTIL), flow[UNTIL])


@inlined
def _over(state: Any, job: Any, slot: Any, outcome: Any, code: Any) -> None:
    """More is known of what is left of a post: no byte of this side is moved by it any more."""
    state[LEFT_COUNT] -= 1
    state[LINGERING] -= job[LINGERS]
    job[LINGERS] = 0
    job[STATE], job[OUTCOME], job[CODE] = ENDED, outcome, code
    _owe(state, slot)


@inlined
def _forget(state: Any, ports: Any, job: Any, slot: Any) -> None:
    """Nobody asks any more for what is left of a post."""
    if job[STATE] == LEFT and job[FLYING] != 0:
        job[CANCELLED] = FORGOTTEN  # its parts are given back where the agent is called
    elif job[STATE] == LEFT:
        _leave(state, ports, job)
        _over(state, job, slot, OVER, 0)
    elif job[STATE] == ENDED and job[OUTCOME] == SEVERED:
        _leave(state, ports, job)


@inlined
def _renewed(state: Any, jobs: Any, ports: Any, at: Any, now: Any) -> None:
    """There is another agent, or the same one goes on, or there is none any more."""
    state[AGENT_AT], state[NOTICES_AT], anew = state[at + 1], state[at + 2], state[at + 3]
    state[HALTED] = 0
    for number in range(state[LIVE]):
        slot = state[LISTED + number]
        job = jobs[slot]
        ended = anew != 0 and job[STAYS] == 0  # but for what goes on without an agent
        if job[STATE] == SENDING and job[CUT] != 0:
            if ended:
                job[LINGERS], job[GONE] = 0, 1
            _end(state, jobs, ports, slot, IN_DOUBT, now)
        elif job[STATE] == ENDED and job[OUTCOME] == IN_DOUBT and ended and job[KIND] != FLOW:  # nobody knows yet
            job[LINGERS], job[GONE] = 0, 1
            if job[POST] == READS:
                _leave(state, ports, job)
        elif job[STATE] == LEFT and job[LINGERS] != 0 and ended:
            if job[POST] == READS:
                _leave(state, ports, job)
            _over(state, job, slot, SEVERED, 0)


@inlined
def _take(state: Any, jobs: Any, ports: Any, now: Any) -> Any:  # noqa: PLR0912 - a line for each kind
    """Take what has come through the pipe; whether anything has."""
    taken = False
    while True:
        got = call_long(ports[READ], state[COMMANDS], state[HERE] + 8 * INBOX, 8 * INBOX_RECORDS * RECORD_WORDS)
        for number in range(max(0, got) // (8 * RECORD_WORDS)):
            at = INBOX + number * RECORD_WORDS
            kind, slot = state[at], state[at + SLOT]
            if kind == STOP:
                state[STOPPING] = 1
            elif kind == HALT:
                state[HALTED] = 1
            elif kind == CATCH:
                state[CATCHING] = 1
            elif kind == AGENT:
                _renewed(state, jobs, ports, at, now)
            elif kind == FORGET and 0 <= slot < ROWS:
                _forget(state, ports, jobs[slot], slot)
            elif 0 <= slot < JOBS:
                job = jobs[slot]
                if kind == COPY:
                    _accept(state, job, at, slot, WAITING)
                elif kind == FLOW:
                    _accept(state, job, at, slot, FLOWS)
                elif kind == ON and job[STATE] == FLOWS:
                    _goes_on(state, jobs, at, slot)
                elif kind == CANCEL and job[KIND] == FLOW:
                    if job[CANCELLED] == 0 and job[STATE] != FREE:
                        job[CANCELLED] = 1
                elif kind == CANCEL and (job[STATE] == WAITING or job[STATE] == OFF):
                    _end(state, jobs, ports, slot, STOPPED, now)
                elif kind == CANCEL and job[CANCELLED] == 0:
                    job[CANCELLED] = 1
            taken = True
        if got < 8 * INBOX_RECORDS * RECORD_WORDS:
            return taken


@inlined
def _fired(ports: Any, job: Any) -> Any:
    """Whether all events of a copy have; 1, 0, or the code of an error as a negative number."""
    while job[FIRED] < job[EVENT_COUNT]:
        code = call(ports[QUERY], load(job[EVENTS] + 8 * job[FIRED]))
        if code == _NOT_READY:
            return 0
        if code != 0:
            return -code
        job[FIRED] += 1
    return 1


@inlined
def _may_begin(state: Any, jobs: Any, ports: Any, slot: Any, now: Any) -> Any:
    """Whether a copy begins: its lease has not ended, and nobody keeps it out. Else it is over."""
    job = jobs[slot]
    if now >= job[UNTIL] or (job[POST] == 0 and not _enter(state, ports, job)):
        _end(state, jobs, ports, slot, STOPPED, now)
        return False
    # before it is launched: a call that does that may stand still itself
    if not exchange(state[ROWS_AT] + 8 * (slot * JOB_WORDS + STATE), WAITING, RUNNING):
        _leave(state, ports, job)
        return False
    job[STARTED] = now
    return True


@inlined
def _next(state: Any, jobs: Any, ports: Any, lane: Any, now: Any) -> Any:
    """The slot whose turn it is in a direction, or in any if that is -1; -1 if none is ready.

    Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the smallest tag, and of equal ones the smaller copy.
    """
    best = -1
    for at in range(state[LIVE]):
        slot = state[LISTED + at]
        job = jobs[slot]
        if job[STATE] != WAITING or (lane >= 0 and job[LANE] != lane):
            continue
        if job[TAG] < 0:
            fired = _fired(ports, job)
            if fired < 0:
                job[CODE] = -fired
                _end(state, jobs, ports, slot, FAILED, now)
            if fired <= 0:
                continue
            if job[PART_COUNT] + job[BLANK_COUNT] + job[FLUSHED] == 0:  # what is to be posted, or told of its events
                if _may_begin(state, jobs, ports, slot, now):
                    _end(state, jobs, ports, slot, DONE, now)
                continue
            # behind the last one of its owner, and not before what is copied now: waiting has gained it nothing
            job[TAG] = max(state[TURN], state[TAGS + job[OWNER]])
            state[TAGS + job[OWNER]] = job[TAG] + max(1, job[BYTES])
        if best < 0 or (job[TAG], job[BYTES]) < (jobs[best][TAG], jobs[best][BYTES]):
            best = slot
    return best


@inlined
def _served(state: Any, job: Any) -> None:
    """A copy has its turn: what is copied brings all forward alike, so that an old owner is not passed for ever."""
    owners = max(1, state[OWNERS])
    state[TURN] = max(state[TURN], job[TAG]) + (job[BYTES] + owners - 1) // owners


# --- on a CPU


@inlined
def _step_host(state: Any, jobs: Any, ports: Any, now: Any) -> Any:
    """Copy a part of what is copied now, beside helpers who do the same; whether anything moved on."""
    team = state[HERE] + 8 * TEAM
    slot = state[CURRENT]
    following = _next(state, jobs, ports, -1, now)
    if slot < 0:
        slot = following
        if slot < 0:
            return False
        job = jobs[slot]
        _served(state, job)
        if not _may_begin(state, jobs, ports, slot, now):
            return True
        state[CURRENT] = slot
        for number in range(job[BLANK_COUNT]):
            blank = job[BLANKS] + 32 * number
            for line in range(load(blank + 16)):
                clear_bytes(load(blank) + line * load(blank + 24), load(blank + 8))
        store(team + 8, 0)
        store(team + 16, job[PARTS])
        add(team, job[PART_COUNT])
        for _ in range(job[HELPERS]):
            call(ports[SEM_POST], load(team + 32))
    job = jobs[slot]
    if job[CANCELLED]:  # what nobody has taken is left alone
        left = add(team, 0)
        while left > 0 and not exchange(team, left, 0):
            left = add(team, 0)
        if left > 0:
            job[PART_COUNT] -= left
            job[CUT] = 1
    left = add(team, 0)
    if left > 0 and exchange(team, left, left - 1):
        copy_part(job[PARTS], left - 1)
        add(team + 8, 1)
    if add(team, 0) > 0 or add(team + 8, 0) < job[PART_COUNT]:
        return left > 0
    state[CURRENT] = -1
    _end(state, jobs, ports, slot, STOPPED if job[CUT] else DONE, _now(state, ports))
    return True


# --- on a GPU


@inlined
def _room(lane: Any, job: Any) -> Any:
    """Find room for a copy's tables in the ring of its direction; False until older ones have ended."""
    words = job[TABLE_WORDS] + 2  # the last one tells of a closed gate, and they begin at multiples of 16 bytes
    if job[OWN_HOST]:
        return True
    if lane[HEAD] == lane[TAIL]:  # nothing is in it
        lane[HEAD] = lane[TAIL] = 0
    size, words = lane[RING_WORDS], (words + 1) & ~1
    start = lane[TAIL] % size
    skipped = size - start if start + words > size else 0
    if lane[TAIL] + skipped + words - lane[HEAD] > size:
        return False
    job[ROOM_START], job[ROOM_END] = (start + skipped) % size, lane[TAIL] + skipped + words
    return True


@inlined
def _launched(state: Any, ports: Any, lane: Any, job: Any) -> Any:
    """Launch everything of a copy; 0, or the code of the call that failed. What came before that may run."""
    host, device = job[OWN_HOST], job[OWN_DEVICE]
    if host == 0:
        host, device = lane[RING_HOST] + 8 * job[ROOM_START], lane[RING_DEVICE] + 8 * job[ROOM_START]
    closed, words, stream = host + 8 * job[TABLE_WORDS], 8 * job[TABLE_WORDS], lane[STREAM]
    copy_bytes(host, job[TABLES], words)
    store(closed, 0)
    code = 0
    if not job[NEAR] and words:
        code = call(ports[UPLOAD], device, host, words, stream)
    if code == 0 and job[FLUSHED]:
        code = call(ports[FLUSH], 0, 100)  # of the current context, to its owner
    for number in range(job[BLANK_COUNT]):
        blank = job[BLANKS] + 32 * number
        if code == 0 and load(blank + 16) == 1:
            code = call(ports[CLEAR], load(blank), 0, load(blank + 8), stream)
        elif code == 0:
            code = call(ports[CLEAR_LINES], load(blank), load(blank + 24), 0, load(blank + 8), load(blank + 16), stream)
    for number in range(job[PART_COUNT]):
        one = job[PARTS] + 8 * LAUNCH_WORDS * number
        sums = load(one + 48)
        state[ARGUMENTS] = host if job[NEAR] else device
        state[ARGUMENTS + 1], state[ARGUMENTS + 2] = load(one + 24), load(one + 32)
        state[ARGUMENTS + 3] = job[SUMS_AT] if sums else job[GATE]
        state[ARGUMENTS + 4] = 0 if sums else job[GATE_GENERATION]
        state[ARGUMENTS + 5] = 0 if sums else closed
        if code == 0:
            blocks = min(job[CTAS], load(one + 40))
            at = state[HERE] + 8 * PARAMETERS
            code = call(ports[LAUNCH], load(one), blocks, 1, 1, load(one + 8), 1, 1, load(one + 16), stream, at, 0)
    if code == 0 and job[SUMS]:
        first = 8 * job[SUMS_AT]
        code = call(ports[DOWNLOAD], host + first, device + first, words - first, stream)
    return code


@inlined
def _launch(state: Any, jobs: Any, ports: Any, lane: Any, slot: Any, now: Any) -> None:
    """Begin a copy for which there is room."""
    job = jobs[slot]
    _served(state, job)
    if not _may_begin(state, jobs, ports, slot, now):
        return
    place = (lane[FIRST] + lane[COUNT]) % QUEUE
    lane[ORDER + place] = slot
    if not job[OWN_HOST]:
        lane[TAIL] = job[ROOM_END]
    lane[COUNT] += 1
    lane[UNDERWAY] += job[BYTES]
    job[CODE] = _launched(state, ports, lane, job)
    code = call(ports[RECORD], lane[ORDER + QUEUE + place], lane[STREAM])
    job[MARKED] = 1 if code == 0 else 0
    if job[CODE] == 0:
        job[CODE] = code


@inlined
def _reap(state: Any, jobs: Any, ports: Any, lane: Any) -> Any:
    """End the copies of a direction that have run. They end in order, so only the oldest is asked for."""
    ended = False
    while lane[COUNT] > 0:
        place = lane[FIRST] % QUEUE
        slot = lane[ORDER + place]
        job = jobs[slot]
        if job[MARKED]:
            code = call(ports[QUERY], lane[ORDER + QUEUE + place])
            if code == _NOT_READY:
                return ended
            if job[CODE] == 0:
                job[CODE] = code
        now = _now(state, ports)
        host = job[OWN_HOST] or lane[RING_HOST] + 8 * job[ROOM_START]
        kept_out = job[GATE] != 0 and load(host + 8 * job[TABLE_WORDS]) != 0
        if job[SUMS] and job[CODE] == 0:
            copy_bytes(job[SUMS], host + 8 * job[SUMS_AT], 8 * (job[TABLE_WORDS] - job[SUMS_AT]))
        if not job[OWN_HOST]:
            lane[HEAD] = job[ROOM_END]
        lane[FIRST] = (place + 1) % QUEUE
        lane[COUNT] -= 1
        lane[UNDERWAY] -= job[BYTES]
        job[STARTED] = max(job[STARTED], lane[LAST_END])
        lane[LAST_END] = now
        _end(state, jobs, ports, slot, FAILED if job[CODE] else STOPPED if kept_out else DONE, now)
        ended = True
    return ended


@inlined
def _step_gpu(state: Any, jobs: Any, ports: Any, now: Any) -> Any:
    """Launch what is next in each direction, and end what has run; whether anything moved on.

    One at a time: a launch takes as long as many a copy, and what has ended meanwhile is waited for elsewhere.
    """
    moved = False
    for number in range(LANES):
        lane = state[LANE_AT + number * LANE_WORDS : LANE_AT + (number + 1) * LANE_WORDS]
        full = lane[COUNT] == QUEUE or (lane[COUNT] > 1 and lane[UNDERWAY] >= _AHEAD_BYTES)
        slot = _next(state, jobs, ports, number, now)
        if not full and slot >= 0 and _room(lane, jobs[slot]):
            _launch(state, jobs, ports, lane, slot, now)
            moved = True
        if _reap(state, jobs, ports, lane):
            moved = True
    return moved


# --- over the transport


@inlined
def _stop_cancelled(state: Any, jobs: Any, ports: Any, now: Any) -> None:
    """Post nothing more that nobody wants any more; what has nothing under way is over, also without an agent."""
    for at in range(state[LIVE]):
        slot = state[LISTED + at]
        job = jobs[slot]
        if job[STATE] == SENDING and job[CANCELLED] != 0 and job[VERDICT] == DONE and job[PIECE] < job[PIECES]:
            job[VERDICT] = STOPPED
            if job[FLYING] == 0:
                _end(state, jobs, ports, slot, STOPPED, now)


@inlined
def _step_posts(state: Any, jobs: Any, ports: Any, now: Any) -> Any:  # noqa: PLR0912 - one pass, in order
    """Post a part, look at all that are under way, let the library work; whether anything moved on.

    One part at a time: where the call that posts it copies, it takes a while, and others have ended meanwhile.
    """
    if state[CATCHING] == 1 and state[AGENT_AT] == 0:
        state[CATCHING] = 2
    if state[SENDING_COUNT] + state[WATCHED] + state[HELD] + state[CATCHING] + state[LISTENING] == 0:
        return False
    if state[SENDING_COUNT] != 0:
        _stop_cancelled(state, jobs, ports, now)
    if not enter_agent(state):
        return False
    moved = False
    slot = -1 if state[HALTED] else turn(state, jobs)
    if slot >= 0:
        _post(state, ports, jobs[slot])
        moved = True
    if state[SENDING_COUNT] != 0:
        now = _now(state, ports)
        for at in range(state[LIVE]):
            slot = state[LISTED + at]
            job = jobs[slot]
            if job[STATE] == SENDING and job[CUT] == 0:
                if look(state, ports, job):
                    moved = True
                if settled(state, ports, job):
                    _end(state, jobs, ports, slot, job[VERDICT], now)
    if state[WATCHED] != 0 and now - state[LOOKED] >= _LOOK_BACK_NS:
        state[LOOKED] = now
        for at in range(state[LIVE]):
            slot = state[LISTED + at]
            job = jobs[slot]
            if job[STATE] == LEFT and job[FLYING] != 0:
                ended = ended_late(state, ports, job)
                if ended or job[CANCELLED] == FORGOTTEN:
                    drop_parts(state, ports, job)
                    _leave(state, ports, job)
                    _over(state, job, slot, OVER, 1 if ended else 0)
    if state[LISTENING] != 0:
        for at in range(state[LIVE]):
            flow = jobs[state[LISTED + at]]
            if flow[KIND] == FLOW and flow[STATE] == FLOWS and _owes(flow):
                inform(state, ports, flow)
    if state[HELD] + state[LISTENING] != 0 and make_progress(state, jobs, ports):
        moved = True
    if state[CATCHING] == 1:
        for at in range(state[LIVE]):
            job = jobs[state[LISTED + at]]
            if job[STATE] == SENDING and caught(state, ports, job):
                job[CUT] = 1
            elif job[STATE] == LEFT or job[STATE] == ENDED:
                drop_parts(state, ports, job)
        state[CATCHING], state[AGENT_AT] = 2, 0  # whose end may be next: it is not called before there is one again
    leave_agent(state)
    return moved


@inlined
def _post(state: Any, ports: Any, job: Any) -> None:
    """Post the next part of a post, unless it may not go on."""
    began, flush = _now(state, ports), job[FLUSHING] == FLUSH_DUE
    request = prepared(state, ports, job, measured(state, job))
    if request == 0:
        return
    # a flush touches nothing that is not touched already
    if not flush and (_now(state, ports) >= job[UNTIL] or (job[ENTERED] == 0 and not _enter(state, ports, job))):
        give_back(state, ports, request)
        job[VERDICT] = STOPPED
        return
    begin_part(state, ports, job, request, began)
    if not flush:
        job[POSTING] += _now(state, ports) - began


# --- all of it


@inlined
def _delay(state: Any, now: Any) -> Any:
    """Nanoseconds until something may have to be done, where nothing moves on."""
    waited = now - state[SINCE]
    longest = state[SELDOM]
    often = min(max(waited // _GROWTH, state[OFTEN]), longest)  # where the library may need us to go on
    delay = _FOREVER
    if state[LIVE] - state[LEFT_COUNT] - state[FLOW_COUNT] + state[EAGER] + state[DUE_COUNT] > 0:
        if waited < state[SPIN]:
            return 0
        delay = min(max(waited // 32, _SHORTEST_NS), often if state[SENDING_COUNT] != 0 else longest)
    if state[HELD] + state[LISTENING] != 0:
        delay = often if delay < 0 else min(delay, often)
    if state[WATCHED] != 0:
        delay = _LOOK_BACK_NS if delay < 0 else min(delay, _LOOK_BACK_NS)
    if state[CATCHING] != 0:
        delay = _SHORTEST_NS
    state[ASLEEP] = 1 if delay < 0 else 0
    return delay


@compiled("int64(int64[::1], int64[:,::1], int64[::1])")
def step(state: Any, jobs: Any, ports: Any) -> Any:
    """Do what is ready.

    Returns:
        Nanoseconds after which it wants to run again, unless a record comes before; -1: then only.
    """
    now = _now(state, ports)
    if state[WANTED] == 0:  # else it cannot see what has ended
        state[LIVED] += min(now - state[STEPPED], _LONGEST_STEP_NS, state[PATIENCE] // 4)
    state[STEPPED], state[STIRRED], state[ASLEEP] = now, 0, 0
    state[TURNS] += 1
    moved = _take(state, jobs, ports, now)
    if state[LIVE] + state[HELD] + state[CATCHING] == 0:
        state[ASLEEP] = 1
        return _FOREVER
    if state[FLOW_COUNT] != 0 and _step_flows(state, jobs, ports, now):
        moved = True
    if _step_gpu(state, jobs, ports, now) if state[GPU] else _step_host(state, jobs, ports, now):
        moved = True
    if _step_posts(state, jobs, ports, now):
        moved = True
    moved = moved or state[STIRRED] != 0
    _tell(state, jobs, ports)
    if moved:
        state[SINCE] = now
        return 0
    return _delay(state, now)


@compiled("void(int64[::1], int64[:,::1], int64[::1])")
def run(state: Any, jobs: Any, ports: Any) -> None:
    """Go on until a record says STOP: what a thread does."""
    if state[GPU]:
        call(ports[SET_CONTEXT], state[CONTEXT])
        state[TIME] = 2  # relaxed: what is asked here must not break what somebody else captures
        call(ports[CAPTURE_MODE], state[HERE] + 8 * TIME)
    state[POLLED] = state[COMMANDS] | 1 << 32  # struct pollfd: the descriptor, and POLLIN
    while True:
        delay = step(state, jobs, ports)
        if state[STOPPING]:
            return
        if delay != 0:
            state[TIME], state[TIME + 1] = 0, delay
            timeout = state[HERE] + 8 * TIME if delay > 0 else 0
            call(ports[PPOLL], state[HERE] + 8 * POLLED, 1, timeout, 0)
