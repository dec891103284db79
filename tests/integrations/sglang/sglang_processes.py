"""The processes of two engines. sglang's stand-in is theirs alone."""

import os
from typing import Any

import torch
from preloaded import Away

SETTINGS = {
    "KVXFER_ARENA_BYTES": "256KiB",
    "KVXFER_CHUNK_BYTES": "16KiB",
    "KVXFER_REVOKE_TIMEOUT": "10",
    "KVXFER_PEER_TIMEOUT": "30",
}


class Held:
    """The engine of a process, once it has been opened."""

    def __init__(self) -> None:
        os.environ.update(SETTINGS)
        torch.set_num_threads(1)
        import sglang_stand_in

        sglang_stand_in.install()
        self._engine: Any = None

    def open(self, settings: dict[str, Any]) -> None:
        from sglang_engine import Engine

        self._engine = Engine(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Process(Away):
    """A process with one engine."""

    def __init__(self) -> None:
        super().__init__(Held)
