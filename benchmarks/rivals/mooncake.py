"""Mooncake's Transfer Engine: one batch of writes, piece by piece."""

import importlib
import importlib.util
import os
from typing import Any

Numbers = Any  # int64 array
VARIANTS = ("mooncake",)
_HOST = "127.0.0.1"


def missing(variant: str, device: str) -> str:
    """Why it cannot run here; empty if it can."""
    del variant, device
    try:
        found = importlib.util.find_spec("mooncake.engine")
    except ModuleNotFoundError:
        found = None
    return "" if found else "Mooncake's Transfer Engine is not installed: pip install mooncake-transfer-engine"


class Rival:
    """One side."""

    TIMED = "source"

    def __init__(self, variant: str, side: Any, source: Any, sink: Any, piece_bytes: int) -> None:
        del variant
        gpu = side.device != "cpu"
        if gpu:
            os.environ["MC_INTRANODE_NVLINK"] = "true"
        else:
            os.environ.setdefault("MC_FORCE_TCP", "true")
        engine = importlib.import_module("mooncake.engine")

        self._piece = piece_bytes
        self._pool = source if sink is None else sink
        self._engine = engine.TransferEngine()
        protocol = "nvlink_intra" if gpu else "tcp"
        self._check("initialize", self._engine.initialize(_HOST, "P2PHANDSHAKE", protocol, ""))
        nbytes = self._pool.numel() * self._pool.element_size()
        self._check("register_memory", self._engine.register_memory(self._pool.data_ptr(), nbytes))
        if sink is not None:
            side.send((self._engine.get_rpc_port(), self._pool.data_ptr()))
        else:
            port, self._there = side.receive()
            self._target = f"{_HOST}:{port}"

    def move(self, sources: Numbers, sinks: Numbers) -> None:
        """One batch of writes."""
        mine = (self._pool.data_ptr() + sources * self._piece).tolist()
        theirs = (self._there + sinks * self._piece).tolist()
        lengths = [self._piece] * len(mine)
        self._check("batch", self._engine.batch_transfer_sync_write(self._target, mine, theirs, lengths))

    def serve(self, sources: Numbers, sinks: Numbers) -> None:
        """Its own threads do it."""

    def close(self) -> None:
        """Forget the pool."""
        self._engine.unregister_memory(self._pool.data_ptr())

    @staticmethod
    def _check(what: str, code: int) -> None:
        if code < 0:
            raise RuntimeError(f"Mooncake's {what} returned {code}")
