"""Tests of what a worker does read what an operator could: how it keeps that is known in one place."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PRIVATE = re.compile(
    r"(?<!self)(?<!cls)\._(site|links|sender|receiver|peers|open|entered|roles|assembly|greeting|rebuilding|listener"
    r"|watch|begin_fetch|draining|closing)\b"
)
PLACE = "integration/inside.py"
UNITS = {  # tests of single classes, which have fields of these names or are what keeps them
    "integration/test_proof.py",
    "test_blocking.py",
}
OTHERS = ("integrations/", "fabric/", "mapped/")
"""Folders whose classes have fields of the same names."""


def test_only_one_module_knows_how_a_worker_keeps_what_it_does():
    found = [
        f"{name}:{number}"
        for path in sorted(TESTS.rglob("*.py"))
        if not (name := path.relative_to(TESTS).as_posix()).startswith(OTHERS) and name not in {PLACE, *UNITS}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found, f"put it into {PLACE}"
