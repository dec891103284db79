"""What ends is told vLLM step by step, and an operator once a minute."""

import logging
from typing import ClassVar

from kvxfer.integrations.vllm.seen import MINUTE_SECONDS, Counts, Ledger


class Timer:
    """Fires when the test says so."""

    made: ClassVar["list[Timer]"] = []

    def __init__(self, seconds, fire):
        assert seconds == MINUTE_SECONDS
        self.fire, self.daemon, self.runs = fire, False, False
        self.made.append(self)

    def start(self):
        assert self.daemon, "the process must end without it"
        self.runs = True

    def cancel(self):
        self.runs = False


def said(caplog):
    found = [record.kvxfer for record in caplog.records]
    caplog.clear()
    return found


def test_a_minute_is_one_line_and_one_without_anything_is_none(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="kvxfer")
    monkeypatch.setattr(Timer, "made", [])
    ledger = Ledger(Timer)
    for _ in range(2):
        ledger.count(Counts([2.0], [5]))
        ledger.count(Counts(load_failures=1))
        (timer,) = Timer.made
        timer.fire()
        loads = {"event": "loads_counted", "count": 1, "bytes": 5, "duration": 2.0, "failures": 1}
        assert said(caplog) == [loads]
        Timer.made.clear()
    ledger.count(Counts(offers=1))
    ledger.count(Counts(offers_lost=1))
    ledger.close()
    assert said(caplog) == [{"event": "offers_counted", "count": 1, "failures": 1}]
    assert [timer.runs for timer in Timer.made] == [False]
    ledger.close()
    assert said(caplog) == []
