"""What the machine does with the transport: posts in parts, each in its turn, and what becomes of them.

A post that was begun cannot be recalled, so it is cut: a part has so many pieces and bytes at most, and right before
each the lease, a cancel and the lock in front of the peer's memory are looked at. The worst thing that happens decides
how a post ends: `IN_DOUBT` over `FAILED` over `STOPPED` over `DONE`. Once something has gone wrong nothing more is
posted, and the end is told when the parts under way have ended, or nothing has moved for too long.

A part that fails while its peer is there may leave some of its pieces under way. If the transport can tell, a few bytes
are moved once more then, to and from where they were: when that is done, so is all that came before. It is tried once.

The agent is called by one thread at a time. Whoever calls it elsewhere (what takes long: registering, connecting) says
so first and waits until the machine is out of it (`claim`); meanwhile the machine posts and polls nothing, and goes on
with all else.

A peer's notification may let a flow go on that takes turns with one of the peer's. It counts if it says the token of
that flow, and comes from the agent that the flow is with; it is no more than a count, and one that says too much lets
nothing begin that would not be right. Any other is counted, and dropped.
"""

# pyright: basic

from typing import Any, Final

from kvxfer.copy.compiler import add, call, compiled, exchange, inlined, load, load_word
from kvxfer.copy.records import (
    ADD_PIECE,
    AGENT_AT,
    BASE,
    BEGIN,
    BROKEN,
    BUSY,
    CAUSE,
    CODE,
    CREATE_LIST,
    CUT_OFF,
    DESTROY,
    DESTROY_LIST,
    DONE,
    FAILED,
    FAR_DEVICE,
    FAR_KIND,
    FAR_PIECES,
    FEEDING,
    FIRST_POST,
    FLOW,
    FLOWS,
    FLUSH_DUE,
    FLUSH_FLIES,
    FLUSHED_ONCE,
    FLUSHING,
    FLYING,
    FLYING_COUNT,
    FORGET_NOTICES,
    GONE,
    HEARD,
    HERE,
    IN_DOUBT,
    KIND,
    LANE,
    LINGERS,
    LISTED,
    LIVE,
    LIVED,
    LIVELY,
    MADE,
    MAKE,
    MOST_BYTES,
    MOST_PARTS,
    MOST_PIECES,
    NEAR_DEVICE,
    NEAR_KIND,
    NEAR_PIECES,
    NEXT_PIECE,
    NEXT_WITHIN,
    NO_FLUSH,
    NOTE,
    NOTE_BYTES,
    NOTICE,
    NOTICE_AGENT,
    NOTICE_AGENTS,
    NOTICE_COUNT,
    NOTICES,
    NOTICES_AT,
    NOTIFY,
    OF_FLOW,
    OFF,
    ORDERLY,
    PARTS_AT,
    PASSED,
    PATIENCE,
    PEER,
    PEER_NUMBER,
    PIECE,
    PIECES,
    POST,
    READS,
    RELEASE,
    SAID,
    SENDING,
    SERVED,
    SERVES,
    SILENT,
    STATE,
    STATUS,
    STRANGE,
    TAGS,
    TOKEN,
    VERDICT,
    WAITING,
    WANTED,
    WATCHED,
    WITHIN,
)

__all__ = [
    "REFUSED",
    "begin_part",
    "call_off",
    "call_off_flow",
    "caught",
    "claim",
    "drop_parts",
    "ended_late",
    "enter_agent",
    "give_back",
    "inform",
    "leave_agent",
    "look",
    "make_progress",
    "measured",
    "prepared",
    "release_claim",
    "settled",
    "turn",
]

IN_PROGRESS: Final = 1
PEER_IS_GONE: Final = -10
REFUSED: Final = -1_000_000
"""From here on downwards a transport says that nothing of a part that it did not take is under way."""
_FLUSH_BYTES: Final = 64


# --- who calls the agent


@compiled("boolean(int64)")
def claim(state: int) -> bool:
    """Keep the machine from calling the agent, until `release_claim`; whether it is out of it. May be asked again.

    Args:
        state: The address of its state. One thread at a time claims it.
    """
    if add(state + 8 * WANTED, 0) == 0:
        add(state + 8 * WANTED, 1)
    free: bool = add(state + 8 * BUSY, 0) == 0
    return free


@compiled("void(int64)")
def release_claim(state: int) -> None:
    """The machine may call the agent again."""
    add(state + 8 * WANTED, -1)


@inlined
def enter_agent(state: Any) -> Any:
    """Whether the machine may call the agent, until `leave_agent`."""
    if state[AGENT_AT] == 0:
        return False
    add(state[HERE] + 8 * BUSY, 1)
    if add(state[HERE] + 8 * WANTED, 0) != 0:
        add(state[HERE] + 8 * BUSY, -1)
        return False
    return True


@inlined
def leave_agent(state: Any) -> None:
    """It has called the agent."""
    add(state[HERE] + 8 * BUSY, -1)


@compiled("boolean(int64, int64)")
def call_off(job: int, flow: int) -> bool:
    """See to it that what has not begun never does; whether that is so.

    Args:
        job: The address of its row.
        flow: What it is to be a step of, plus 1; 0 if of none. A row that is another's by now is left as it is.
    """
    off: bool = exchange(job + 8 * STATE, WAITING, OFF)
    if off and add(job + 8 * OF_FLOW, 0) != flow:
        exchange(job + 8 * STATE, OFF, WAITING)
        return True
    return off or load(job + 8 * STATE) == OFF


@compiled("boolean(int64)")
def call_off_flow(flow: int) -> bool:
    """See to it that no further step of a flow begins; whether that is so. `flow` is the address of its row."""
    off: bool = exchange(flow + 8 * STATE, FLOWS, OFF)
    return off or add(flow + 8 * STATE, 0) != FEEDING


# --- one part


@inlined
def _list(state: Any, ports: Any, kind: Any, device: Any, pieces: Any, first: Any, within: Any, nbytes: Any) -> Any:
    """Make a list of the pieces of one side, so many bytes from `within` bytes of the first one on."""
    status = call(ports[CREATE_LIST], kind, state[HERE] + 8 * MADE)
    if status != 0:
        return status
    made, at = state[MADE], pieces + 16 * first
    while nbytes > 0 and status == 0:
        length = min(load(at + 8) - within, nbytes)
        if length > 0:
            status = call(ports[ADD_PIECE], made, load(at) + within, length, device)
        nbytes -= length
        within = 0
        at += 16
    if status != 0:
        call(ports[DESTROY_LIST], made)
        return status
    return made


@inlined
def _measured(state: Any, job: Any, piece: Any, within: Any, pieces: Any, nbytes: Any) -> Any:
    """How many bytes a part has that begins there; `state` has where it ends. Pieces stay whole that may."""
    total = 0
    while piece < job[PIECES] and pieces > 0 and total < nbytes:
        length = load(job[NEAR_PIECES] + 16 * piece + 8) - within
        if length > nbytes - total:
            if total > 0 and length <= nbytes:
                break
            within += nbytes - total
            total = nbytes
        else:
            total += length
            piece += 1
            within = 0
        if length > 0:
            pieces -= 1
    while piece < job[PIECES] and load(job[NEAR_PIECES] + 16 * piece + 8) == 0:  # no part is made of these alone
        piece += 1
    state[NEXT_PIECE], state[NEXT_WITHIN] = piece, within
    return total


@inlined
def _made(state: Any, ports: Any, job: Any, piece: Any, within: Any, nbytes: Any) -> Any:
    """Make the request of a part; what failed if there is none, which is less than 0."""
    near = _list(state, ports, job[NEAR_KIND], job[NEAR_DEVICE], job[NEAR_PIECES], piece, within, nbytes)
    if near < 0:
        return near
    far = _list(state, ports, job[FAR_KIND], job[FAR_DEVICE], job[FAR_PIECES], piece, within, nbytes)
    status = far
    if far >= 0:
        out = state[HERE] + 8 * MADE
        status = call(ports[MAKE], state[AGENT_AT], 0 if job[POST] == READS else 1, near, far, job[PEER], out, 0)
        call(ports[DESTROY_LIST], far)
    call(ports[DESTROY_LIST], near)
    return state[MADE] if status >= 0 else status


@inlined
def give_back(state: Any, ports: Any, request: Any) -> None:
    """Give back a request. One that the library does not take back stays: its agent ends with it."""
    if call(ports[RELEASE], state[AGENT_AT], request) >= 0:
        call(ports[DESTROY], request)


@inlined
def _is_gone(state: Any, ports: Any, request: Any) -> Any:
    """Whether a request failed since its peer is gone."""
    return ports[CAUSE] != 0 and call(ports[CAUSE], load(state[AGENT_AT]), load(request)) == PEER_IS_GONE


# --- what went wrong


@inlined
def _worsen(job: Any, outcome: Any, code: Any, gone: Any) -> None:
    if outcome > job[VERDICT]:
        job[VERDICT], job[CODE], job[GONE] = outcome, code, gone


@inlined
def _failed(state: Any, job: Any, outcome: Any, code: Any, gone: Any) -> None:
    """A call failed. Where the peer is gone the library has ended its own work; any other error says nothing."""
    if outcome == IN_DOUBT and not gone:
        job[LINGERS] = 1
    if job[FLUSHING] == NO_FLUSH or job[FLUSHING] == FLUSH_DUE:
        job[FLUSHING] = FLUSH_DUE if state[ORDERLY] and job[LINGERS] and not gone else NO_FLUSH
    _worsen(job, outcome, code, gone)


# --- a turn


@inlined
def turn(state: Any, jobs: Any) -> Any:
    """The slot of the post of which a part is next; -1 if there is none. Peers take turns, and so do posts of each."""
    best = -1
    for at in range(state[LIVE]):
        slot = state[LISTED + at]
        job = jobs[slot]
        if job[STATE] != SENDING:
            continue
        if job[FLUSHING] == FLUSH_DUE:
            wants = job[FLYING] == 0
        else:
            wants = job[VERDICT] == DONE and job[PIECE] < job[PIECES] and job[FLYING] < MOST_PARTS
        if not wants:
            continue
        if best < 0:
            best = slot
            continue
        peer, other = state[TAGS + job[PEER_NUMBER]], state[TAGS + jobs[best][PEER_NUMBER]]
        if peer < other or (peer == other and job[SERVED] < jobs[best][SERVED]):
            best = slot
    return best


@inlined
def measured(state: Any, job: Any) -> Any:
    """How many bytes the next part has."""
    if job[FLUSHING] == FLUSH_DUE:
        return _measured(state, job, 0, 0, 1, _FLUSH_BYTES)
    return _measured(state, job, job[PIECE], job[WITHIN], job[MOST_PIECES], job[MOST_BYTES])


@inlined
def prepared(state: Any, ports: Any, job: Any, nbytes: Any) -> Any:
    """Make the request of the next part; 0 if that failed, which has ended the post then."""
    flush = job[FLUSHING] == FLUSH_DUE
    state[SERVES] += 1
    state[TAGS + job[PEER_NUMBER]] = job[SERVED] = state[SERVES]
    if flush:
        job[FLUSHING] = FLUSHED_ONCE
        made = _made(state, ports, job, 0, 0, nbytes)
    else:
        made = _made(state, ports, job, job[PIECE], job[WITHIN], nbytes)
    if made < 0:
        _failed(state, job, IN_DOUBT if flush else FAILED, made, False)
        return 0
    return made


@inlined
def begin_part(state: Any, ports: Any, job: Any, request: Any, began: Any) -> None:
    """Post the part whose request was made."""
    flush = job[FLUSHING] == FLUSHED_ONCE
    status = call(ports[BEGIN], state[AGENT_AT], request, 0)
    if status < 0:
        gone = _is_gone(state, ports, request)
        give_back(state, ports, request)
        _failed(state, job, FAILED if status <= REFUSED else IN_DOUBT, status, gone)
        return
    if flush:
        job[FLUSHING] = FLUSH_FLIES
    else:
        if job[FIRST_POST] == 0:
            job[FIRST_POST] = began
        job[PIECE], job[WITHIN], job[LIVELY] = state[NEXT_PIECE], state[NEXT_WITHIN], state[LIVED]
    job[PARTS_AT + job[FLYING]] = request
    job[FLYING] += 1
    state[FLYING_COUNT] += 1


@inlined
def look(state: Any, ports: Any, job: Any) -> Any:
    """Look at every part of a post; whether any has ended."""
    ended = False
    at = 0
    while at < job[FLYING]:
        request = job[PARTS_AT + at]
        status = call(ports[STATUS], state[AGENT_AT], request)
        if status == IN_PROGRESS:
            at += 1
            continue
        if status < 0:
            gone = _is_gone(state, ports, request)
            if job[FLUSHING] == FLUSH_FLIES:
                job[FLUSHING] = FLUSHED_ONCE
            _failed(state, job, IN_DOUBT, status, gone)
        else:
            job[LIVELY] = state[LIVED]
            if job[FLUSHING] == FLUSH_FLIES:  # everything before it has ended too
                job[FLUSHING] = FLUSHED_ONCE
                job[LINGERS], job[VERDICT] = 0, FAILED
        job[FLYING] -= 1
        state[FLYING_COUNT] -= 1
        job[PARTS_AT + at] = job[PARTS_AT + job[FLYING]]
        give_back(state, ports, request)
        ended = True
    return ended


@inlined
def settled(state: Any, ports: Any, job: Any) -> Any:
    """Whether nothing of a post is under way and nothing more is posted: what is silent is given up."""
    if job[FLYING] > 0 and state[LIVED] - job[LIVELY] >= state[PATIENCE]:
        watched = job[VERDICT] != IN_DOUBT or job[FLUSHING] == FLUSH_FLIES  # their ends tell the end of all of it
        job[LINGERS] = 1
        _worsen(job, IN_DOUBT, SILENT, False)
        state[FLYING_COUNT] -= job[FLYING]
        state[WATCHED] += job[FLYING]
        if not watched:
            drop_parts(state, ports, job)
        return True
    over = job[VERDICT] != DONE or job[PIECE] == job[PIECES]
    return over and job[FLYING] == 0 and job[FLUSHING] != FLUSH_DUE


@inlined
def drop_parts(state: Any, ports: Any, job: Any) -> None:
    """Give back what a post that was given up still has under way, unseen from now on."""
    for at in range(job[FLYING]):
        give_back(state, ports, job[PARTS_AT + at])
    state[WATCHED] -= job[FLYING]
    job[FLYING] = 0


@inlined
def ended_late(state: Any, ports: Any, job: Any) -> Any:
    """Look at what was under way when it was given up; whether all of it has ended as it should."""
    at = 0
    while at < job[FLYING]:
        request = job[PARTS_AT + at]
        status = call(ports[STATUS], state[AGENT_AT], request)
        if status < 0:  # what that part has left under way nobody can say
            drop_parts(state, ports, job)
            return False
        if status == IN_PROGRESS:
            at += 1
            continue
        job[FLYING] -= 1
        state[WATCHED] -= 1
        job[PARTS_AT + at] = job[PARTS_AT + job[FLYING]]
        give_back(state, ports, request)
    return job[FLYING] == 0


@inlined
def caught(state: Any, ports: Any, job: Any) -> Any:
    """The agent is about to end: give up a post that has something under way; whether it has."""
    if job[FLYING] == 0 and job[FLUSHING] != FLUSH_DUE:
        return False
    if job[FLYING] > 0:
        job[LINGERS] = 1
    job[FLUSHING] = FLUSHED_ONCE
    _worsen(job, IN_DOUBT, CUT_OFF, False)
    state[FLYING_COUNT] -= job[FLYING]
    state[WATCHED] += job[FLYING]
    drop_parts(state, ports, job)
    return True


@inlined
def make_progress(state: Any, jobs: Any, ports: Any) -> Any:
    """Let the library work, and take in what peers have notified this agent of; whether a flow may go on by that."""
    status = call(ports[NOTICES], state[AGENT_AT], state[NOTICES_AT], 0)
    if status < 0 and state[BROKEN] == 0:
        state[BROKEN] = status
    heard = _listen(state, jobs, ports)
    call(ports[FORGET_NOTICES], state[NOTICES_AT])
    return heard


# --- flows that take turns with those of peers


@inlined
def inform(state: Any, ports: Any, flow: Any) -> None:
    """Tell the peer how many steps of a flow are done. Where that cannot be said the loops say it in a while."""
    state[NOTE], state[NOTE + 1] = flow[TOKEN], flow[TOKEN + 1]
    state[NOTE + 2] = 2 * (flow[BASE] + flow[PASSED]) + flow[LANE]
    flow[SAID] = flow[PASSED]
    call(ports[NOTIFY], state[AGENT_AT], flow[PEER], state[HERE] + 8 * NOTE, NOTE_BYTES, 0)


@inlined
def _listen(state: Any, jobs: Any, ports: Any) -> Any:
    """Look at all notifications that have come."""
    notices, at, heard = state[NOTICES_AT], state[HERE] + 8 * NOTE, False
    state[NOTE] = 0
    call(ports[NOTICE_AGENTS], notices, at)
    for number in range(state[NOTE]):
        call(ports[NOTICE_AGENT], notices, number, at + 8)
        agent = state[NOTE + 1]
        call(ports[NOTICE_COUNT], notices, agent, at + 16)
        for one in range(state[NOTE + 2]):
            call(ports[NOTICE], notices, agent, one, at + 24, at + 32)
            said, nbytes = state[NOTE + 3], state[NOTE + 4]
            if nbytes != NOTE_BYTES:
                state[STRANGE] += 1
            elif _heard(state, jobs, agent, load(said), load(said + 8), load(said + 16)):
                heard = True
    return heard


@inlined
def _heard(state: Any, jobs: Any, agent: Any, first: Any, second: Any, word: Any) -> Any:
    """An agent says how many steps of a flow are done; whether ours that takes turns with it learns more by that."""
    for at in range(state[LIVE]):
        flow = jobs[state[LISTED + at]]
        if flow[KIND] != FLOW or (flow[STATE] != FLOWS and flow[STATE] != OFF) or flow[LANE] == word & 1:
            continue
        if first != 0 and flow[TOKEN] == first and flow[TOKEN + 1] == second and _same(flow[PEER], agent):
            count = (word >> 1) - flow[BASE]
            if count <= flow[HEARD]:
                return False
            flow[HEARD] = count
            return True
    state[STRANGE] += 1
    return False


@inlined
def _same(one: Any, other: Any) -> Any:
    """Whether two C strings are the same."""
    at = 0
    while load_word(one + at, 1) == load_word(other + at, 1):
        if load_word(one + at, 1) == 0:
            return True
        at += 1
    return False
