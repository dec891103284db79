"""Disaggregated serving for sglang that lives out of its tree: its KV senders and receivers, made of kvxfer.

    SGLANG_PLUGINS=kvxfer python -m sglang.launch_server --disaggregation-mode prefill \
        --disaggregation-transfer-backend nixl ...

    conn.py      the classes that sglang makes: manager, sender, receiver, bootstrap server
    rooms.py     what a sender does (an offer that grows chunk by chunk), a receiver (a fetch that waits for it), and
                 both: a `BlockingWorker` that is polled whenever sglang polls
    meeting.py   where the engines find each other
    caches.py    sglang's pools and rows of metadata in kvxfer's words

Only the first of them imports sglang. What it overrides, reads there and is read of was taken from release 0.5.23, with
whose sources `make engines` compares it.
"""

__all__ = ["plugin"]


def plugin() -> None:
    """What sglang calls in each of its processes, as the plugin `kvxfer`. Nothing, unless `SGLANG_PLUGINS` names it.

    Then these classes take the place of the transfer backend `nixl`.
    """
    from kvxfer.integrations.sglang.conn import install

    install()
