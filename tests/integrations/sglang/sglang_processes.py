"""The processes of two engines. sglang's stand-in is theirs alone."""

import os
import traceback
from typing import Any

import preloaded

ANSWER_SECONDS = 90
SETTINGS = {
    "KVXFER_ARENA_BYTES": "256KiB",
    "KVXFER_CHUNK_BYTES": "16KiB",
    "KVXFER_REVOKE_TIMEOUT": "10",
    "KVXFER_PEER_TIMEOUT": "30",
}


def _serve(wire: Any, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    import torch

    torch.set_num_threads(1)
    import sglang_stand_in

    sglang_stand_in.install()
    from sglang_engine import Engine

    found: Any = None
    while True:
        try:
            name, given, named = wire.recv()
        except EOFError:
            return
        try:
            if name == "open":
                found, answer = Engine(given[0]), None
            else:
                answer = getattr(found, name)(*given, **named)
            wire.send((answer, ""))
        except BaseException:  # noqa: BLE001 - whoever asked hears of it
            wire.send((None, traceback.format_exc()))


class Process:
    """A process with one engine."""

    def __init__(self) -> None:
        self._wire, theirs = preloaded.CONTEXT.Pipe()
        self.process = preloaded.process(_serve, (theirs, SETTINGS))
        self.process.start()
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self._wire.send((name, given, named))
            assert self._wire.poll(ANSWER_SECONDS), f"{name} does not end"
            answer, error = self._wire.recv()
            assert not error, error
            return answer

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)

    def end(self) -> None:
        self.process.kill()
        self.process.join(20)
        self.process.close()  # raises if it still runs
        self._wire.close()
