"""What the machine does with the transport: posts in parts, each in its turn, and what becomes of them.

A post that was begun cannot be recalled, so it is cut: a part has so many pieces and bytes at most, and right before
each the lease, a cancel and the lock in front of the peer's memory are looked at. The worst thing that happens decides
how a post ends: `IN_DOUBT` over `FAILED` over `STOPPED` over `DONE`. Once something has gone wrong nothing more is
posted, and the end is told when the parts under way have ended, or nothing has moved for too long.

A part that fails while its peer is there may leave some of its pieces under way. If the transport can tell, a few bytes
are moved once more then, to and from where they were: when that is done, so is all that came before. It is tried once.

The agent is called by one thread at a time. Whoever calls it elsewhere (what takes long: registering, connecting) says
so first and waits until the machine is out of it (`acquire_agent`); meanwhile the machine posts and polls nothing, and
goes on with all else.

A peer's notification may let a flow go on that takes turns with one of the peer's. It counts if it says the token of
that flow, which nobody else knows, and names the agent that the flow is with. It is a count, and lets no step begin
that the loop has not allowed. Any other is counted, and dropped.
"""

# pyright: basic

from typing import Any, Final

from kvxfer.copy import records as r
from kvxfer.copy.compiler import add, call, compiled, exchange, inlined, load, load_word

__all__ = [
    "REFUSED",
    "acquire_agent",
    "begin_part",
    "cut_off",
    "drop_parts",
    "enter_agent",
    "give_back",
    "leave_agent",
    "look_at_parts",
    "look_late",
    "make_progress",
    "next_post",
    "notify_peer",
    "prepare_part",
    "prevent_start",
    "prevent_steps",
    "release_agent",
    "settle",
]

IN_PROGRESS: Final = 1
PEER_IS_GONE: Final = -10
REFUSED: Final = -1_000_000
"""From here on downwards a transport says that nothing of a part that it did not take is under way."""
_FLUSH_BYTES: Final = 64


# --- who calls the agent


@compiled("boolean(int64)")
def acquire_agent(state: int) -> bool:
    """Keep the machine from calling the agent, until `release_agent`; whether it is out of it. May be asked again.

    One thread at a time claims it.
    """
    if add(state + 8 * r.WANTED, 0) == 0:
        add(state + 8 * r.WANTED, 1)
    free: bool = add(state + 8 * r.BUSY, 0) == 0
    return free


@compiled("void(int64)")
def release_agent(state: int) -> None:
    """The machine may call the agent again."""
    add(state + 8 * r.WANTED, -1)


@inlined
def enter_agent(state: Any) -> Any:
    """Whether the machine may call the agent, until `leave_agent`."""
    if state[r.AGENT_AT] == 0:
        return False
    add(state[r.HERE] + 8 * r.BUSY, 1)
    if add(state[r.HERE] + 8 * r.WANTED, 0) != 0:
        add(state[r.HERE] + 8 * r.BUSY, -1)
        return False
    return True


@inlined
def leave_agent(state: Any) -> None:
    """It has called the agent."""
    add(state[r.HERE] + 8 * r.BUSY, -1)


@compiled("boolean(int64, int64)")
def prevent_start(job: int, flow: int) -> bool:
    """See to it that what has not begun never does, as a step of this flow (plus 1); whether that is so.

    A row that is another's by now is left as it is.
    """
    off: bool = exchange(job + 8 * r.STATE, r.WAITING, r.OFF)
    if off and add(job + 8 * r.OF_FLOW, 0) != flow:
        exchange(job + 8 * r.STATE, r.OFF, r.WAITING)
        return True
    return off or load(job + 8 * r.STATE) == r.OFF


@compiled("boolean(int64)")
def prevent_steps(flow: int) -> bool:
    """See to it that no further step of a flow begins; whether that is so. `flow` is the address of its row."""
    off: bool = exchange(flow + 8 * r.STATE, r.FLOWS, r.OFF)
    return off or add(flow + 8 * r.STATE, 0) != r.FEEDING


# --- one part


@inlined
def _list(state: Any, ports: Any, kind: Any, device: Any, pieces: Any, first: Any, within: Any, nbytes: Any) -> Any:
    """Make a list of the pieces of one side, so many bytes from `within` bytes of the first one on."""
    status = call(ports[r.CREATE_LIST], kind, state[r.HERE] + 8 * r.MADE)
    if status != 0:
        return status
    made, at = state[r.MADE], pieces + 16 * first
    while nbytes > 0 and status == 0:
        length = min(load(at + 8) - within, nbytes)
        if length > 0:
            status = call(ports[r.ADD_PIECE], made, load(at) + within, length, device)
        nbytes -= length
        within = 0
        at += 16
    if status != 0:
        call(ports[r.DESTROY_LIST], made)
        return status
    return made


@inlined
def _measure(state: Any, job: Any, piece: Any, within: Any, pieces: Any, nbytes: Any) -> Any:
    """How many bytes a part has that begins there; `state` has where it ends. Pieces stay whole that may."""
    total = 0
    while piece < job[r.PIECES] and pieces > 0 and total < nbytes:
        length = load(job[r.NEAR_PIECES] + 16 * piece + 8) - within
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
    while piece < job[r.PIECES] and load(job[r.NEAR_PIECES] + 16 * piece + 8) == 0:  # no part is made of these alone
        piece += 1
    state[r.NEXT_PIECE], state[r.NEXT_WITHIN] = piece, within
    return total


@inlined
def _make_request(state: Any, ports: Any, job: Any, piece: Any, within: Any, nbytes: Any) -> Any:
    """Make the request of a part; what failed if there is none, which is less than 0."""
    near = _list(state, ports, job[r.NEAR_KIND], job[r.NEAR_DEVICE], job[r.NEAR_PIECES], piece, within, nbytes)
    if near < 0:
        return near
    far = _list(state, ports, job[r.FAR_KIND], job[r.FAR_DEVICE], job[r.FAR_PIECES], piece, within, nbytes)
    status = far
    if far >= 0:
        out = state[r.HERE] + 8 * r.MADE
        status = call(
            ports[r.MAKE], state[r.AGENT_AT], 0 if job[r.POST] == r.READS else 1, near, far, job[r.PEER], out, 0
        )
        call(ports[r.DESTROY_LIST], far)
    call(ports[r.DESTROY_LIST], near)
    return state[r.MADE] if status >= 0 else status


@inlined
def give_back(state: Any, ports: Any, request: Any) -> None:
    """Give back a request. One that the library does not take back stays: its agent ends with it."""
    if call(ports[r.RELEASE], state[r.AGENT_AT], request) >= 0:
        call(ports[r.DESTROY], request)


@inlined
def _is_gone(state: Any, ports: Any, request: Any) -> Any:
    """Whether a request failed since its peer is gone."""
    return ports[r.CAUSE] != 0 and call(ports[r.CAUSE], load(state[r.AGENT_AT]), load(request)) == PEER_IS_GONE


# --- what went wrong


@inlined
def _worsen(job: Any, outcome: Any, code: Any, gone: Any) -> None:
    if outcome > job[r.VERDICT]:
        job[r.VERDICT], job[r.CODE], job[r.GONE] = outcome, code, gone


@inlined
def _note_failure(state: Any, job: Any, outcome: Any, code: Any, gone: Any) -> None:
    """A call failed. Where the peer is gone the library has ended its own work; any other error says nothing."""
    if outcome == r.IN_DOUBT and not gone:
        job[r.LINGERS] = 1
    if job[r.FLUSHING] == r.NO_FLUSH or job[r.FLUSHING] == r.FLUSH_DUE:
        job[r.FLUSHING] = r.FLUSH_DUE if state[r.ORDERLY] and job[r.LINGERS] and not gone else r.NO_FLUSH
    _worsen(job, outcome, code, gone)


# --- a turn


@inlined
def next_post(state: Any, jobs: Any) -> Any:
    """The slot of the post of which a part is next; -1 if there is none. Peers take turns, and so do posts of each."""
    best = -1
    for at in range(state[r.LIVE]):
        slot = state[r.LISTED + at]
        job = jobs[slot]
        if job[r.STATE] != r.SENDING:
            continue
        if job[r.FLUSHING] == r.FLUSH_DUE:
            wants = job[r.FLYING] == 0
        else:
            wants = job[r.VERDICT] == r.DONE and job[r.PIECE] < job[r.PIECES] and job[r.FLYING] < r.MOST_PARTS
        if not wants:
            continue
        if best < 0:
            best = slot
            continue
        peer, other = state[r.TAGS + job[r.PEER_NUMBER]], state[r.TAGS + jobs[best][r.PEER_NUMBER]]
        if peer < other or (peer == other and job[r.SERVED] < jobs[best][r.SERVED]):
            best = slot
    return best


@inlined
def prepare_part(state: Any, ports: Any, job: Any) -> Any:
    """Make the request of the next part; 0 if that failed, which has ended the post then."""
    flush = job[r.FLUSHING] == r.FLUSH_DUE
    piece, within, pieces, nbytes = job[r.PIECE], job[r.WITHIN], job[r.MOST_PIECES], job[r.MOST_BYTES]
    if flush:
        job[r.FLUSHING] = r.FLUSHED_ONCE
        piece, within, pieces, nbytes = 0, 0, 1, _FLUSH_BYTES
    state[r.SERVES] += 1
    state[r.TAGS + job[r.PEER_NUMBER]] = job[r.SERVED] = state[r.SERVES]
    made = _make_request(state, ports, job, piece, within, _measure(state, job, piece, within, pieces, nbytes))
    if made < 0:
        _note_failure(state, job, r.IN_DOUBT if flush else r.FAILED, made, False)
        return 0
    return made


@inlined
def begin_part(state: Any, ports: Any, job: Any, request: Any, began: Any) -> None:
    """Post the part whose request was made."""
    flush = job[r.FLUSHING] == r.FLUSHED_ONCE
    if not flush:  # also if that fails: what is moved once more then has its time from here on
        job[r.LIVELY] = state[r.LIVED]
    status = call(ports[r.BEGIN], state[r.AGENT_AT], request, 0)
    if status < 0:
        gone = _is_gone(state, ports, request)
        give_back(state, ports, request)
        _note_failure(state, job, r.FAILED if status <= REFUSED else r.IN_DOUBT, status, gone)
        return
    if flush:
        job[r.FLUSHING] = r.FLUSH_FLIES
    else:
        if job[r.FIRST_POST] == 0:
            job[r.FIRST_POST] = began
        job[r.PIECE], job[r.WITHIN] = state[r.NEXT_PIECE], state[r.NEXT_WITHIN]
    job[r.PARTS_AT + job[r.FLYING]] = request
    job[r.FLYING] += 1


@inlined
def look_at_parts(state: Any, ports: Any, job: Any) -> None:
    """Look at every part of a post, and give back those that have ended."""
    at = 0
    while at < job[r.FLYING]:
        request = job[r.PARTS_AT + at]
        status = call(ports[r.STATUS], state[r.AGENT_AT], request)
        if status == IN_PROGRESS:
            at += 1
            continue
        if status < 0:
            gone = _is_gone(state, ports, request)
            if job[r.FLUSHING] == r.FLUSH_FLIES:
                job[r.FLUSHING] = r.FLUSHED_ONCE
            _note_failure(state, job, r.IN_DOUBT, status, gone)
        else:
            job[r.LIVELY] = state[r.LIVED]
            if job[r.FLUSHING] == r.FLUSH_FLIES:  # everything before it has ended too
                job[r.FLUSHING] = r.FLUSHED_ONCE
                job[r.LINGERS], job[r.VERDICT] = 0, r.FAILED
        job[r.FLYING] -= 1
        job[r.PARTS_AT + at] = job[r.PARTS_AT + job[r.FLYING]]
        give_back(state, ports, request)
        state[r.STIRRED] = 1


@inlined
def settle(state: Any, ports: Any, job: Any) -> Any:
    """Whether nothing of a post is under way and nothing more is posted: what is silent is given up."""
    if job[r.FLYING] > 0 and state[r.LIVED] - job[r.LIVELY] >= state[r.PATIENCE]:
        watched = (
            job[r.VERDICT] != r.IN_DOUBT or job[r.FLUSHING] == r.FLUSH_FLIES
        )  # their ends tell the end of all of it
        job[r.LINGERS] = 1
        _worsen(job, r.IN_DOUBT, r.SILENT, False)
        state[r.WATCHED] += job[r.FLYING]
        if not watched:
            drop_parts(state, ports, job)
        return True
    over = job[r.VERDICT] != r.DONE or job[r.PIECE] == job[r.PIECES]
    return over and job[r.FLYING] == 0 and job[r.FLUSHING] != r.FLUSH_DUE


@inlined
def drop_parts(state: Any, ports: Any, job: Any) -> None:
    """Give back what a post that was given up still has under way, unseen from now on."""
    for at in range(job[r.FLYING]):
        give_back(state, ports, job[r.PARTS_AT + at])
    state[r.WATCHED] -= job[r.FLYING]
    job[r.FLYING] = 0


@inlined
def look_late(state: Any, ports: Any, job: Any) -> Any:
    """Look at what was under way when it was given up; whether all of it has ended as it should."""
    at = 0
    while at < job[r.FLYING]:
        request = job[r.PARTS_AT + at]
        status = call(ports[r.STATUS], state[r.AGENT_AT], request)
        if status < 0:  # what that part has left under way nobody can say
            drop_parts(state, ports, job)
            return False
        if status == IN_PROGRESS:
            at += 1
            continue
        job[r.FLYING] -= 1
        state[r.WATCHED] -= 1
        job[r.PARTS_AT + at] = job[r.PARTS_AT + job[r.FLYING]]
        give_back(state, ports, request)
    return job[r.FLYING] == 0


@inlined
def cut_off(state: Any, ports: Any, job: Any) -> Any:
    """The agent is about to end: give up a post that has something under way; whether it has."""
    if job[r.FLYING] == 0 and job[r.FLUSHING] != r.FLUSH_DUE:
        return False
    if job[r.FLYING] > 0:
        job[r.LINGERS] = 1
    job[r.FLUSHING] = r.FLUSHED_ONCE
    _worsen(job, r.IN_DOUBT, r.CUT_OFF, False)
    state[r.WATCHED] += job[r.FLYING]
    drop_parts(state, ports, job)
    return True


@inlined
def make_progress(state: Any, jobs: Any, ports: Any) -> None:
    """Let the library work, and take in what peers have notified this agent of."""
    status = call(ports[r.NOTICES], state[r.AGENT_AT], state[r.NOTICES_AT], 0)
    if status < 0 and state[r.BROKEN] == 0:
        state[r.BROKEN] = status
    _read_notifications(state, jobs, ports)
    call(ports[r.FORGET_NOTICES], state[r.NOTICES_AT])


# --- flows that take turns with those of peers


@inlined
def notify_peer(state: Any, ports: Any, flow: Any) -> None:
    """Tell the peer how many steps of a flow are done. Where that cannot be said the loops say it in a while."""
    state[r.NOTE], state[r.NOTE + 1] = flow[r.TOKEN], flow[r.TOKEN + 1]
    state[r.NOTE + 2] = 2 * (flow[r.BASE] + flow[r.PASSED]) + flow[r.LANE]
    flow[r.SAID] = flow[r.PASSED]
    call(ports[r.NOTIFY], state[r.AGENT_AT], flow[r.PEER], state[r.HERE] + 8 * r.NOTE, r.NOTE_BYTES, 0)


@inlined
def _read_notifications(state: Any, jobs: Any, ports: Any) -> None:
    """Look at the notifications that have come: at no more than there can be flows, whoever sends how many."""
    notices, at, left = state[r.NOTICES_AT], state[r.HERE] + 8 * r.NOTE, r.JOBS
    state[r.NOTE] = 0
    call(ports[r.NOTICE_AGENTS], notices, at)
    names = state[r.NOTE]
    state[r.STRANGE] += max(0, names - left)
    for number in range(min(names, left)):  # to find one takes as long as there are others before it
        call(ports[r.NOTICE_AGENT], notices, number, at + 8)
        agent = state[r.NOTE + 1]
        if call(ports[r.NOTICE_COUNT], notices, agent, at + 16) != 0:  # as of a name that has a zero in it
            state[r.STRANGE] += 1
            continue
        count = state[r.NOTE + 2]
        state[r.STRANGE] += max(0, count - left)
        for one in range(min(count, left)):
            status = call(ports[r.NOTICE], notices, agent, one, at + 24, at + 32)
            said, nbytes = state[r.NOTE + 3], state[r.NOTE + 4]
            if status != 0 or nbytes != r.NOTE_BYTES:
                state[r.STRANGE] += 1
            else:
                _on_notification(state, jobs, agent, load(said), load(said + 8), load(said + 16))
        left = max(0, left - count)


@inlined
def _on_notification(state: Any, jobs: Any, agent: Any, first: Any, second: Any, word: Any) -> None:
    """An agent says how many steps of a flow are done: ours that takes turns with it may go on by that."""
    for at in range(state[r.LIVE] if state[r.LISTENING] != 0 else 0):
        flow = jobs[state[r.LISTED + at]]
        if flow[r.KIND] != r.FLOW or (flow[r.STATE] != r.FLOWS and flow[r.STATE] != r.OFF) or flow[r.LANE] == word & 1:
            continue
        if first != 0 and flow[r.TOKEN] == first and flow[r.TOKEN + 1] == second and _same(flow[r.PEER], agent):
            count = (word >> 1) - flow[r.BASE]
            if count > flow[r.HEARD]:
                flow[r.HEARD], state[r.STIRRED] = count, 1
            return
    state[r.STRANGE] += 1


@inlined
def _same(one: Any, other: Any) -> Any:
    """Whether two C strings are the same."""
    at = 0
    while load_word(one + at, 1) == load_word(other + at, 1):
        if load_word(one + at, 1) == 0:
            return True
        at += 1
    return False
