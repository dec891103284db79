"""An attribute that is computed when it is first asked for keeps no other object waiting."""

import threading
from dataclasses import dataclass, field

from kvxfer.names import lazy


@dataclass(frozen=True, eq=False)
class Sum:
    numbers: list[int]
    began: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event | None = None

    @lazy
    def total(self) -> int:
        self.began.set()
        if self.go_on is not None:
            assert self.go_on.wait(10)
        return sum(self.numbers)


def test_no_object_waits_for_another_one():
    go_on = threading.Event()
    slow = Sum([1], go_on=go_on)
    found = []
    thread = threading.Thread(target=lambda: found.append(slow.total))
    thread.start()
    assert slow.began.wait(10)
    quick = threading.Thread(target=lambda: found.append(Sum([2]).total))
    quick.start()
    quick.join(5)
    assert found == [2]
    go_on.set()
    thread.join()
    assert found == [2, 1]
