"""Transfers of a prefill rank begin a few a turn; those that never ran must not keep others from it."""

import asyncio

import pytest
from inside import service
from stage import Cache

from kvxfer import TransferTimeoutError


async def test_tasks_that_are_cancelled_before_they_run_keep_none_waiting(stage):
    """An application may cancel every task of its loop, and keep the worker."""
    prefill, decode = await stage.pair(Cache(), Cache())
    role = service(prefill).prefill
    fetch = role.on_fetch

    def cancelled(link, message):
        fetch(link, message)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("kvxfer send"):
                task.cancel()

    role.on_fetch = cancelled
    for number in range(3):  # more than begin in a turn
        prefill.offer(f"r{number}", [1, 2], tokens=8)
        into = [3 + 2 * number, 4 + 2 * number]
        with pytest.raises(TransferTimeoutError):
            await decode.fetch(prefill.engine.ticket(f"r{number}"), into, tokens=range(8), timeout=0.2)
    role.on_fetch = fetch
    prefill.offer("last", [1, 2], tokens=8)
    await decode.fetch(prefill.engine.ticket("last"), [3, 4], tokens=range(8), timeout=10)
