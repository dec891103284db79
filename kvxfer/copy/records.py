"""The mover's memory, word by word: the records and events that cross its pipes, and what the machine keeps.

All words are int64. A record is the whole of what the loop decided about a copy; the machine keeps it as the first
words of that copy's row, and its own words behind them. Compiled code (`machine.py`) reads this, and so do the loop's
side (`mover.py`) and tests: there is no other description.
"""

from typing import Final

JOBS: Final = 1024
"""Copies and flows that the mover has at most. Their events fit into a pipe, so that none is ever in the way of
another."""
STEPS: Final = 1024
"""Steps of flows that are under way at most, of all; their rows come behind those of the rest."""
KEPT: Final = 256
"""Rows of steps that are kept for copies without a post: posts to silent peers may hold all others for long."""
GREED: Final = 3
"""Of the others a peer gets one more while it has less than so many times as many as are free: so there is one for
whoever has none, until all are taken."""
ROWS: Final = JOBS + STEPS
MOST_OWNERS: Final = 3 * JOBS
"""Owners that the machine knows: whose each copy is, to whom it goes, and to whom what went that is left of others."""
QUEUE: Final = 64
"""Copies of one direction that are launched on a GPU at most."""

# --- ports: C functions by address; 0 where there is no such thing

READ, WRITE, PPOLL, CLOCK_GETTIME, FCNTL, SEM_POST = range(6)
SET_CONTEXT, CAPTURE_MODE, LAUNCH, RECORD, QUERY, UPLOAD, DOWNLOAD, CLEAR, CLEAR_LINES, FLUSH = range(6, 16)
AGENT_PORTS: Final = 16  # from here on those of a transport
CREATE_LIST, ADD_PIECE, DESTROY_LIST, MAKE, BEGIN, STATUS, RELEASE, DESTROY, NOTICES, FORGET_NOTICES = range(16, 26)
NOTIFY, NOTICE_AGENTS, NOTICE_AGENT, NOTICE_COUNT, NOTICE = range(26, 31)
CAUSE: Final = 31
PORTS: Final = 32

# --- a record: what the loop asks for

COPY, CANCEL, STOP, POKE, HALT, CATCH, AGENT, FORGET, FLOW, ON = range(1, 11)  # COPY: a step, which a flow has
KIND, SLOT = 0, 1
# gather or scatter; whose it is (~: of whom nothing is known); how many; when its lease ends, in ns
LANE, OWNER, BYTES, UNTIL = 2, 3, 4, 5
LOCK, LOCK_BYTE, GENERATION, LOCK_WORDS, LOCK_USERS = 6, 7, 8, 9, 10  # descriptor (-1: none), and what a `PeerGate` has
EVENTS, EVENT_COUNT = 11, 12  # CUDA events that must have fired
BLANKS, BLANK_COUNT = 13, 14  # to zero before: address, width, lines, pitch of each
PARTS, PART_COUNT = 15, 16  # on a CPU what `copy_part` takes; on a GPU launches, LAUNCH_WORDS of each
HELPERS, CTAS = 17, 17  # threads to be woken; thread blocks of a launch at most
TABLES, TABLE_WORDS, NEAR = 18, 19, 20  # what a GPU reads: where, how many; whether from pinned memory
GATE, GATE_GENERATION = 21, 22  # of a `Gate`; 0: none
FLUSHED: Final = 23  # whether what NICs have written must be flushed before
OWN_HOST, OWN_DEVICE = 24, 25  # room for tables that are larger than the ring: pinned memory, and on the device
SUMS_AT, SUMS = 26, 27  # where among the tables results begin, and where those go; 0: it adds up nothing
# what the transport moves then: which way (0: nothing), to or from whom (a name, and its number among owners)
POST, PEER, PEER_NUMBER = 28, 29, 30
NEAR_KIND, NEAR_DEVICE, NEAR_PIECES = 31, 32, 33  # of the memory here, as NIXL has it; address and bytes of each piece
FAR_KIND, FAR_DEVICE, FAR_PIECES = 34, 35, 36
PIECES: Final = 37
MOST_PIECES, MOST_BYTES = 38, 39  # of one part
STAYS: Final = 40  # whether it goes on without the agent that has it under way
OF_FLOW: Final = 41  # of a step: the slot of its flow, plus 1
RECORD_WORDS: Final = 42
READS, WRITES = 1, 2

# a flow says what its steps have in common (direction, owner, lease, lock, peer); where their records are, and for how
# many there is room; how many may be under way; and, as `ON` says anew, how many are there, may begin, will be in all,
# and for how long, in ns, more may be done that the loop is not told of (up to `SOON_NS`: while some is under way)
STEPS_AT, STEPS_ROOM, WIDTH, KNOWN, ALLOWED, TOTAL, QUIET = range(13, 20)
SOON_NS: Final = 1_000_000
# where it takes turns with a flow of the peer's: in how many places (0: it does not), how many steps the peer has done
# by its word, which of all its first one is; what both name it by (0: they do not), at whose agent (`PEER`)
HEARD, PLACES, BASE, TOKEN = 27, 31, 32, 33  # and the word behind

# --- behind it, the machine's own

STATE, STARTED, OUTCOME, CODE, CANCELLED, FIRED, ROOM_START, ROOM_END = range(42, 50)
ENTERED, MARKED, FINISHED, CUT, TAG, COPIED = range(50, 56)
# of what is posted: where the next part begins, when and how the first one did, what has gone wrong, who was served
PIECE, WITHIN, FIRST_POST, POSTING, SERVED, LIVELY, VERDICT, GONE, LINGERS, FLUSHING = range(56, 66)
FLYING, STEP, PARTS_AT = 66, 67, 68  # parts under way; which step of a flow; a request of each part
MOST_PARTS: Final = 4
JOB_WORDS: Final = PARTS_AT + MOST_PARTS
# of a flow: the step that is next; the first so many are done, and the loop was told of so many; those under way; what
# its steps took, in ns, where those on the wire together count once; up to when that was
NEXT, PASSED, TOLD, ACTIVE, COPYING, WIRED, WIRED_TO = range(20, 27)
SAID, TOLD_AT = 35, 36  # of how many the peer was told; when the loop was told last
FREE, WAITING, RUNNING, SENDING, ENDED, LEFT, OFF, FLOWS, FEEDING = range(9)
"""LEFT: nobody waits for it, and it may still move bytes, or holds the lock in front of a peer's memory. OFF: the loop
has seen to it, in one exchange for WAITING (of a flow for FLOWS), that it never begins. FLOWS: a flow, whose steps have
rows of their own; FEEDING: one of them may be about to begin."""
FORGOTTEN: Final = 2
"""In CANCELLED: nobody asks any more for what is left of it."""
NO_FLUSH, FLUSH_DUE, FLUSH_FLIES, FLUSHED_ONCE = range(4)

LAUNCH_WORDS: Final = 6
"""A launch: function, threads, bytes of shared memory, first header, headers, tiles."""

# --- an event: how a copy ended (slot, outcome, code, started and finished in ns)

EVENT_WORDS: Final = 8
DONE, STOPPED, FAILED, IN_DOUBT, OVER, SEVERED, PASSING = range(7)
"""OVER: what was in doubt has ended, or is not asked for any more; SEVERED: the agent that had it under way has;
PASSING: more steps of a flow are done."""
COUNTED: Final = 1 << 8
"""Beside the outcome of a flow, times how many of its steps are done. In place of four times it tells when the first
step began, how long all were copied, when the first was posted, and how long all were on the wire."""
OUTCOMES: Final = 15
IS_GONE, IS_LINGERING, IS_LEFT = 16, 32, 64
"""Beside the outcome: the peer is gone; bytes of this side may still move; the row is kept."""
SILENT, CUT_OFF = -1001, -1002
"""Codes of what no function has said: nothing has moved for too long; the agent is no more."""
NOBODY: Final = -1
"""In place of a slot: what was under way is caught."""

# --- a notification: a token of two words; how many steps are done, twice, and whether a scatter's are

NOTE_WORDS: Final = 7
NOTE_BYTES: Final = 24

# --- state

HERE: Final = 0  # the address of the state itself
COMMANDS, NEWS = 1, 2  # descriptors
STOPPING, LIVE, CURRENT, TURN = 3, 4, 5, 6  # CURRENT: slot that is copied on a CPU; TURN: as of a TAG
OWNERS, DUE_FIRST, DUE_COUNT = 48, 49, 50  # who has any copy, as the loop says; of DUE
FIXED, NOW = 8, 9  # whether the time is what NOW says (simulations), in ns
SINCE, SPIN = 10, 11  # when anything last moved on; for how long nothing is slept for after that
CONTEXT, GPU = 12, 13
TIME, POLLED, LOCKED, ARGUMENTS, PARAMETERS = 14, 16, 17, 21, 29  # room for what C functions take
# what threads that copy together share: parts that nobody has taken, parts that were copied, the list, whether there
# will be no more, the semaphore on which helpers sleep, and `sem_wait`
TEAM: Final = 42
AGENT_AT, NOTICES_AT = 51, 52  # the transport's agent, 0 if there is none; where it puts notifications
WANTED, BUSY = 53, 54  # who is about to call it elsewhere, or does; whether the machine does
HALTED, ORDERLY, PATIENCE = 55, 56, 57  # post nothing; as of `Native`; for how long nothing need move, in ns
LIVED, STEPPED = 58, 59  # time in which the machine ran and might call the agent; when it ran last
HELD, SERVES = 60, 61  # who counts on it to make progress, as the loop says; parts that had their turn
SENDING_COUNT: Final = 65  # rows
WATCHED, LOOKED = 69, 70  # parts of rows that are left; when they were looked at
NEXT_PIECE, NEXT_WITHIN, MADE = 71, 72, 73  # where the part ends that was made last; what a function made
OFTEN, SELDOM = 77, 78  # a sleep at most, in ns: where parts fly or somebody is held awake for; else
ROWS_AT: Final = 80  # the address of all jobs
ASLEEP: Final = 79  # whether it does nothing before a record comes
SPARE_COUNT, FLOW_COUNT, EAGER = 62, 63, 64  # of SPARE; flows; those of which a step is under way, or may begin
LISTENING, STRANGE = 82, 83  # flows that hear of peers by notifications; notifications that nobody waits for
NOTE: Final = 84  # room for one, and for what functions say of one
BROKEN: Final = 76  # what the agent said first when it could not make progress
STIRRED, CATCHING = 74, 75  # whether anything has moved on in this step; 1: catch what is under way, 2: say so
OUT: Final = NOTE + NOTE_WORDS  # room for an event
LANE_AT: Final = OUT + EVENT_WORDS
STREAM, RING_HOST, RING_DEVICE, RING_WORDS, HEAD, TAIL, FIRST, COUNT, UNDERWAY, LAST_END = range(10)
ORDER: Final = 10  # slots in the order of the stream, from FIRST on; behind them CUDA events, one a place
LANE_WORDS: Final = ORDER + 2 * QUEUE
LANES: Final = 2
LISTED: Final = LANE_AT + LANES * LANE_WORDS  # slots that are not free
DUE: Final = LISTED + ROWS  # slots whose event is owed, in the order in which they ended
SPARE: Final = DUE + ROWS  # slots of steps that are free
TAGS: Final = SPARE + STEPS  # where the last copy of each owner ends, as turns go
POSTED: Final = TAGS + MOST_OWNERS  # rows of what is posted, or to be, or is left of that, by peer
FEED: Final = POSTED + MOST_OWNERS  # room for the record of a step
INBOX: Final = FEED + RECORD_WORDS
INBOX_RECORDS: Final = 16
STATE_WORDS: Final = INBOX + INBOX_RECORDS * RECORD_WORDS
