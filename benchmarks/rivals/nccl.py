"""NCCL: pack the pieces, send and receive them as one, unpack. Timed until they are unpacked."""

from typing import Any

import torch
import torch.distributed

Numbers = Any  # int64 array
VARIANTS = ("nccl, packed",)


def missing(variant: str, device: str) -> str:
    """Why it cannot run here; empty if it can."""
    del variant
    if device == "cpu":
        return "NCCL moves GPU memory only; gloo, which would take its place, is not what anyone uses for this"
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "this torch was built without NCCL"
    return "" if torch.cuda.device_count() > 1 else "NCCL wants a GPU for each process, and there is one"


class Rival:
    """One side."""

    TIMED = "sink"

    def __init__(self, variant: str, side: Any, source: Any, sink: Any, piece_bytes: int) -> None:
        del variant, piece_bytes
        self._pool = source if sink is None else sink
        rank = 0 if sink is None else 1
        port = 0 if rank == 0 else side.receive()
        make_store: Any = torch.distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        self._store = make_store("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
        if rank == 0:
            side.send(self._store.port)
        device = self._pool.device
        torch.distributed.init_process_group("nccl", store=self._store, rank=rank, world_size=2, device_id=device)

    def move(self, sources: Numbers, sinks: Numbers) -> None:
        """Pack and send."""
        del sinks
        packed = self._pool.index_select(0, torch.from_numpy(sources).to(self._pool.device))
        torch.distributed.send(packed, 1)
        torch.cuda.synchronize(self._pool.device)

    def serve(self, sources: Numbers, sinks: Numbers) -> None:
        """Receive and unpack."""
        del sources
        packed = torch.empty((len(sinks), self._pool.shape[1]), dtype=self._pool.dtype, device=self._pool.device)
        torch.distributed.recv(packed, 0)
        self._pool.index_copy_(0, torch.from_numpy(sinks).to(self._pool.device), packed)
        torch.cuda.synchronize(self._pool.device)

    def close(self) -> None:
        """End the group."""
        torch.distributed.destroy_process_group()
