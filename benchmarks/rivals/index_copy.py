"""Plain torch in one process that owns both pools: `index_select`, copy to the other device, `index_copy_`."""

from typing import Any

import torch

Numbers = Any  # int64 array
VARIANTS = ("torch index_select + copy + index_copy_",)
PROCESSES = 1


def missing(variant: str, device: str) -> str:
    """It can run everywhere."""
    del variant, device
    return ""


class Rival:
    """Both sides."""

    TIMED = "source"

    def __init__(self, variant: str, side: Any, source: Any, sink: Any, piece_bytes: int) -> None:
        del variant, side, piece_bytes
        self._source = source
        self._sink = sink

    def move(self, sources: Numbers, sinks: Numbers) -> None:
        """Pack, copy, unpack."""
        source, sink = self._source, self._sink
        packed = source.index_select(0, torch.from_numpy(sources).to(source.device))
        sink.index_copy_(0, torch.from_numpy(sinks).to(sink.device), packed.to(sink.device))
        if sink.device.type == "cuda":
            torch.cuda.synchronize(source.device)
            torch.cuda.synchronize(sink.device)

    def serve(self, sources: Numbers, sinks: Numbers) -> None:
        """There is no other process."""

    def close(self) -> None:
        """Nothing was set up."""
