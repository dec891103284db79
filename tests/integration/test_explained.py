"""What the logs and stats of two workers say of the size of pieces."""

import asyncio
import logging

from stage import Cache, Copied


def lines(caplog, event):
    return [
        record.kvxfer
        for record in caplog.records
        if record.name.startswith("kvxfer") and record.kvxfer["event"] == event
    ]


async def test_both_sides_say_what_limits_pieces(stage, caplog):
    caplog.set_level(logging.DEBUG, logger="kvxfer")
    source, target = Cache(heads=range(8)), Cache(heads=range(4))
    prefill, decode = await stage.pair(source, target)
    for attempt in range(2):
        offer = prefill.offer(f"r{attempt}", [3, 1], tokens=8)
        copied = Copied(target).bring(source, [3, 1], [0, 2], range(8))
        result = await decode.fetch(prefill.engine.ticket(f"r{attempt}"), [0, 2], tokens=range(8), timeout=5)
        copied.check()
        await asyncio.wait_for(offer.released(), 5)
        assert result.stats.limited_by == "source token stride"
    for event in ("transfer_sent", "fetch_ended"):
        assert [line["limited_by"] for line in lines(caplog, event)] == ["source token stride"] * 2
        assert {line["pieces"] for line in lines(caplog, event)} == {2 * 2 * 8}
    planned = lines(caplog, "pair_planned")
    assert sorted(line["role"] for line in planned) == ["receiving", "sending"]  # once a pair, not once a transfer
    for line in planned:
        assert "x 4 heads = 128 B" in line["explanation"]
        assert "heads are split: 0..7 lie there" in line["explanation"]
