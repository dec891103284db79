"""The walk through a fetch that docs/architecture.md describes, against one that runs."""

import re
import sys
from pathlib import Path

import kvxfer
from kvxfer import READY

PACKAGE = Path(kvxfer.__file__).parent
PAGE = PACKAGE.parent / "docs/architecture.md"
ROW = re.compile(r"^\| (decode|prefill) \| `([\w/]+\.py)`: `([\w.]+)` \|", re.MULTILINE)


def told(rank):
    """(file, function) of every row of a rank's."""
    page = PAGE.read_text()
    start = page.index("## One fetch, function by function")
    rows = ROW.findall(page[start : page.index("\n## ", start + 1)])
    return [(file, function) for of, file, function in rows if of == rank]


async def test_a_fetch_passes_what_the_page_says_in_that_order(stage, source, target):
    """Each rank's; how the two of them take turns depends on how fast bytes come."""
    prefill, decode = await stage.pair(source, target, route="staged", arena_bytes="256KiB", chunk_bytes="32KiB")
    passed = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            passed.append((Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_qualname))

    result = None
    for number in range(3):  # the last one finds all that is made once
        prefill.offer(f"r{number}", range(4), tokens=16, after=READY)
        ticket = prefill.engine.ticket(f"r{number}")
        passed.clear()
        sys.setprofile(note)
        try:
            result = await decode.fetch(ticket, range(4), tokens=range(16), after=READY)
        finally:
            sys.setprofile(None)
    assert result is not None
    assert (result.stats.route, result.stats.chunks) == ("staged", 1)
    for rank in ("decode", "prefill"):
        rows, rest = told(rank), iter(passed)
        assert len(rows) > 5
        assert [row for row in rows if row not in rest] == []  # `in` goes on from where the one before was found
