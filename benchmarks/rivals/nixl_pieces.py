"""NIXL with one descriptor a piece: how engines use it, and at its best.

All pieces of the pool are listed once, when the two sides meet; a request picks from these lists by number. As engines
run it, NIXL's progress thread is on; at its best it is off, the caller polls, and the scatter lists of its UCX backend
may be on.
"""

import importlib.util
import os
import time
from typing import Any

import numpy as np

Numbers = Any  # int64 array
VARIANTS = ("nixl, as engines run it", "nixl, no progress thread", "nixl, no progress thread, SGL")
_STEP_SECONDS = 0.001


def missing(variant: str, device: str) -> str:
    """Why it cannot run here; empty if it can."""
    del variant, device
    return "" if importlib.util.find_spec("nixl") else "nixl is not installed: pip install nixl"


class Rival:
    """One side."""

    TIMED = "source"

    def __init__(self, variant: str, side: Any, source: Any, sink: Any, piece_bytes: int) -> None:
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        if variant.endswith("SGL"):
            os.environ["NIXL_UCX_SGL_ENABLE"] = "y"  # read when the backend is created
        from nixl import nixl_agent, nixl_agent_config

        name = "source" if sink is None else "sink"
        pool = source if sink is None else sink
        self._side = side
        self._threaded = variant == VARIANTS[0]
        self._agent = nixl_agent(
            f"{name}-{os.getpid()}-{piece_bytes}",
            nixl_agent_config(enable_prog_thread=self._threaded, backends=["UCX"]),
        )
        self._registered = self._agent.register_memory(pool)
        if sink is not None:
            device = max(pool.get_device(), 0)
            side.send((self._agent.get_agent_metadata(), pool.data_ptr(), len(pool), device))
            side.receive()
            return
        metadata, address, count, device = side.receive()
        self._peer = self._agent.add_remote_agent(metadata)
        kind = "DRAM" if pool.device.type == "cpu" else "VRAM"
        mine = rows(pool.data_ptr(), len(pool), piece_bytes, max(pool.get_device(), 0))
        self._mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, kind)
        self._theirs = self._agent.prep_xfer_dlist(self._peer, rows(address, count, piece_bytes, device), kind)
        side.send("listed")

    def move(self, sources: Numbers, sinks: Numbers) -> None:
        """One write of all pieces."""
        agent = self._agent
        picked = (self._mine, sources.astype(np.int32), self._theirs, sinks.astype(np.int32))
        handle = agent.make_prepped_xfer("WRITE", *picked, b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")
        agent.release_xfer_handle(handle)

    def serve(self, sources: Numbers, sinks: Numbers) -> None:
        """Let NIXL work until the write has arrived: without its thread it needs the calls of the target."""
        del sources, sinks
        while not any(self._agent.get_new_notifs().values()):
            if self._threaded:
                time.sleep(_STEP_SECONDS)  # an engine looks once a step

    def close(self) -> None:
        """Give everything back."""
        if hasattr(self, "_mine"):
            self._agent.release_dlist_handle(self._mine)
            self._agent.release_dlist_handle(self._theirs)
            self._side.receive()  # the target is still there until here
            self._agent.remove_remote_agent(self._peer)
        else:
            self._side.send("closing")
        self._agent.deregister_memory(self._registered)


def rows(address: int, count: int, nbytes: int, device: int) -> Any:
    """NIXL's rows (address, bytes, device) of a pool."""
    table = np.empty((count, 3), dtype=np.uint64)
    table[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
    table[:, 1] = nbytes
    table[:, 2] = device
    return table
