"""A KV connector (v1) for vLLM that lives out of its tree: prefill and decode engines hand requests over by kvxfer.

    --kv-transfer-config '{"kv_connector": "KvxferConnector", "kv_connector_module_path": "kvxfer.integrations.vllm",
                           "kv_role": "kv_producer"}'

    connector.py   the class that vLLM loads, once in the scheduler's process and once in each worker's
    scheduler.py   what the first does: tickets and cards only, no torch, no NIXL
    worker.py      what the second does: a `BlockingWorker` that is polled once a step
    orders.py      what the first tells the second, step by step
    caches.py      vLLM's cache tensors in kvxfer's words
    layout.py      where an attention backend puts K and V, found by having it write
    seen.py        what loads and offers came to, for who operates them

Only the first of them imports vLLM. What it overrides and reads there was taken from release 0.33.0; the names and
signatures are recorded beside the tests.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.integrations.vllm.connector import KvxferConnector as KvxferConnector

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> object:
    if name != "KvxferConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvxfer.integrations.vllm.connector import KvxferConnector

    return KvxferConnector
