"""The mover's memory, word by word: the records and events that cross its pipes, and what the machine keeps.

All words are int64. A record is the whole of what the loop decided about a copy; the machine keeps it as the first
words of that copy's row, and its own words behind them. Compiled code (`machine.py`) reads this, and so do the loop's
side (`mover.py`) and tests: there is no other description.
"""

from typing import Final

__all__ = [
    "ARGUMENTS",
    "BLANKS",
    "BLANK_COUNT",
    "BYTES",
    "CANCEL",
    "CANCELLED",
    "CAPTURE_MODE",
    "CLEAR",
    "CLEAR_LINES",
    "CLOCK_GETTIME",
    "CODE",
    "COMMANDS",
    "CONTEXT",
    "COPY",
    "COUNT",
    "CTAS",
    "CURRENT",
    "CUT",
    "DONE",
    "DOWNLOAD",
    "DUE",
    "DUE_COUNT",
    "DUE_FIRST",
    "ENDED",
    "ENTERED",
    "EVENTS",
    "EVENT_COUNT",
    "EVENT_WORDS",
    "FAILED",
    "FCNTL",
    "FINISHED",
    "FIRED",
    "FIRST",
    "FIXED",
    "FLUSH",
    "FLUSHED",
    "FREE",
    "GATE",
    "GATE_GENERATION",
    "GENERATION",
    "GPU",
    "HEAD",
    "HELPERS",
    "HERE",
    "INBOX",
    "INBOX_RECORDS",
    "JOBS",
    "JOB_WORDS",
    "KIND",
    "LANE",
    "LANES",
    "LANE_AT",
    "LANE_WORDS",
    "LAST_END",
    "LAUNCH",
    "LAUNCH_WORDS",
    "LISTED",
    "LIVE",
    "LOCK",
    "LOCKED",
    "LOCK_BYTE",
    "LOCK_USERS",
    "LOCK_WORDS",
    "MARKED",
    "MOST_OWNERS",
    "NEAR",
    "NEWS",
    "NOW",
    "ORDER",
    "OUT",
    "OUTCOME",
    "OWNER",
    "OWNERS",
    "OWN_DEVICE",
    "OWN_HOST",
    "PARAMETERS",
    "PARTS",
    "PART_COUNT",
    "POLLED",
    "PORTS",
    "PPOLL",
    "QUERY",
    "QUEUE",
    "READ",
    "RECORD",
    "RECORD_WORDS",
    "RING_DEVICE",
    "RING_HOST",
    "RING_WORDS",
    "ROOM_END",
    "ROOM_START",
    "RUNNING",
    "SEM_POST",
    "SET_CONTEXT",
    "SINCE",
    "SLOT",
    "SPIN",
    "STARTED",
    "STATE",
    "STATE_WORDS",
    "STOP",
    "STOPPED",
    "STOPPING",
    "STREAM",
    "SUMS",
    "SUMS_AT",
    "TABLES",
    "TABLE_WORDS",
    "TAG",
    "TAGS",
    "TAIL",
    "TEAM",
    "TIME",
    "TURN",
    "TURNS",
    "UNDERWAY",
    "UNTIL",
    "UPLOAD",
    "WAITING",
    "WRITE",
]

JOBS: Final = 1024
"""Copies that the mover has at most. Their events fit into a pipe, so that none is ever in the way of another."""
MOST_OWNERS: Final = 2048
"""Owners that the machine knows, at least as many as copies."""
QUEUE: Final = 64
"""Copies of one direction that are launched on a GPU at most."""

# --- ports: C functions by address; 0 where there is no such thing

READ, WRITE, PPOLL, CLOCK_GETTIME, FCNTL, SEM_POST = range(6)
SET_CONTEXT, CAPTURE_MODE, LAUNCH, RECORD, QUERY, UPLOAD, DOWNLOAD, CLEAR, CLEAR_LINES, FLUSH = range(6, 16)
PORTS: Final = 16

# --- a record: what the loop asks for

COPY, CANCEL, STOP = 1, 2, 3
KIND, SLOT = 0, 1
# gather or scatter; whose it is (~: of whom nothing is known); how many; when its lease ends, in ns
LANE, OWNER, BYTES, UNTIL = 2, 3, 4, 5
LOCK, LOCK_BYTE, GENERATION, LOCK_WORDS, LOCK_USERS = 6, 7, 8, 9, 10  # descriptor (-1: none), and as `Key` has them
EVENTS, EVENT_COUNT = 11, 12  # CUDA events that must have fired
BLANKS, BLANK_COUNT = 13, 14  # to zero before: address, width, lines, pitch of each
PARTS, PART_COUNT = 15, 16  # on a CPU what `copy_part` takes; on a GPU launches, LAUNCH_WORDS of each
HELPERS, CTAS = 17, 17  # threads to be woken; thread blocks of a launch at most
TABLES, TABLE_WORDS, NEAR = 18, 19, 20  # what a GPU reads: where, how many; whether from pinned memory
GATE, GATE_GENERATION = 21, 22  # of a `Gate`; 0: none
FLUSHED: Final = 23  # whether what NICs have written must be flushed before
OWN_HOST, OWN_DEVICE = 24, 25  # room for tables that are larger than the ring: pinned memory, and on the device
SUMS_AT, SUMS = 26, 27  # words of the tables from which on they are results, and where those go; 0: none
RECORD_WORDS: Final = 28

# --- behind it, the machine's own

STATE, STARTED, OUTCOME, CODE, CANCELLED, FIRED, ROOM_START, ROOM_END = range(28, 36)
ENTERED, MARKED, FINISHED, CUT, TAG = range(36, 41)
JOB_WORDS: Final = 41
FREE, WAITING, RUNNING, ENDED = range(4)

LAUNCH_WORDS: Final = 7
"""A launch: function, threads, bytes of shared memory, first header, headers, tiles; whether it adds up."""

# --- an event: how a copy ended (slot, outcome, code, started and finished in ns)

EVENT_WORDS: Final = 5
DONE, STOPPED, FAILED = range(3)

# --- state

HERE: Final = 0  # the address of the state itself
COMMANDS, NEWS = 1, 2  # descriptors
STOPPING, LIVE, CURRENT, TURN, TURNS = 3, 4, 5, 6, 7  # CURRENT: slot that is copied on a CPU; TURN: as of a TAG
OWNERS, DUE_FIRST, DUE_COUNT = 48, 49, 50  # who has any copy, as the loop says; of DUE
FIXED, NOW = 8, 9  # whether the time is what NOW says (simulations), in ns
SINCE, SPIN = 10, 11  # when anything last moved on; for how long nothing is slept for after that
CONTEXT, GPU = 12, 13
TIME, POLLED, LOCKED, ARGUMENTS, PARAMETERS, OUT = 14, 16, 17, 21, 29, 37  # room for what C functions take
TEAM: Final = 42  # what helpers share with the mover: see `kvxfer.copy.walk.TEAM_WORDS`
LANE_AT: Final = 60
STREAM, RING_HOST, RING_DEVICE, RING_WORDS, HEAD, TAIL, FIRST, COUNT, UNDERWAY, LAST_END = range(10)
ORDER: Final = 10  # slots in the order of the stream, from FIRST on; behind them CUDA events, one a place
LANE_WORDS: Final = ORDER + 2 * QUEUE
LANES: Final = 2
LISTED: Final = LANE_AT + LANES * LANE_WORDS  # slots that are not free
DUE: Final = LISTED + JOBS  # slots whose event is owed, in the order in which they ended
TAGS: Final = DUE + JOBS  # where the last copy of each owner ends, as turns go
INBOX: Final = TAGS + MOST_OWNERS
INBOX_RECORDS: Final = 16
STATE_WORDS: Final = INBOX + INBOX_RECORDS * RECORD_WORDS
