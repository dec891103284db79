"""How long a transfer is likely to take, from what was measured on some machine: a prediction, not a promise.

    seconds = fixed + chunks * chunk + pieces * piece + bytes / bandwidth

A piece costs a descriptor on the routes that post each of them, and a copy on `staged`, which is nothing worth naming
on a GPU. The formula knows one pair of ranks that is alone: no contention, no waiting for blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvxfer.protocol.messages import Route

__all__ = ["PROFILES", "Costs", "Profile", "profile_of"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a route costs on one kind of machine.

    Attributes:
        fixed_s: Seconds for every transfer: the exchange of frames, planning, the first post.
        chunk_s: Seconds for every chunk, with the default window of chunks under way.
        piece_s: Seconds for every contiguous piece.
        bytes_per_s: Bandwidth once all that is under way.
    """

    fixed_s: float
    chunk_s: float
    piece_s: float
    bytes_per_s: float

    def seconds(self, *, nbytes: int, chunks: int, pieces: int) -> float:
        """By the formula."""
        return self.fixed_s + chunks * self.chunk_s + pieces * self.piece_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of one kind of machine.

    Attributes:
        name: For `kvxfer plan --profile`.
        hardware: What was measured, in words.
        routes: Costs of each route.
    """

    name: str
    hardware: str
    routes: Mapping[Route, Costs]

    def seconds(self, route: Route, *, nbytes: int, chunks: int, pieces: int) -> float:
        """Predicted seconds from `fetch` to its return.

        Args:
            route: How the bytes travel.
            nbytes: Size of the transfer.
            chunks: Chunks that it is cut into.
            pieces: Contiguous pieces, neighbours merged.
        """
        return self.routes[route].seconds(nbytes=nbytes, chunks=chunks, pieces=pieces)


_H200: Final = Profile(
    "h200-nvlink",
    "two NVLinked H200 of one host, caches and arena in GPU memory (torch 2.11, NIXL 1.5.1, UCX 1.23)",
    MappingProxyType(
        {
            # whole fetches with 24 CTAs, NHD to HND: 2 MiB in 1.1 ms, in chunks of 256 MiB 512 MiB in 3.6 ms and 2 GiB
            # in 10.2 ms; the bandwidth is that of the kernel. The formula gives 1.2, 3.2 and 9.9 ms.
            Route.MAPPED: Costs(fixed_s=0.9e-3, chunk_s=0.25e-3, piece_s=0.0, bytes_per_s=305e9),
            # whole fetches in chunks of 64 MiB, 3 under way: 2 MiB in 2.8 ms, 512 MiB in 10.8 ms, 2 GiB in 31.4 to 33.2
            # ms; the bandwidth is that of one contiguous NIXL write. The formula gives 2.8, 9.8 and 33.1 ms.
            Route.STAGED: Costs(fixed_s=2.0e-3, chunk_s=0.8e-3, piece_s=0.0, bytes_per_s=390e9),
            # 512 MiB in pieces of 8 KiB in 281 ms, of 32 KiB in 67 ms, of 2 MiB in 5.4 ms; the formula gives 273, 72
            # and 5.7 ms. As scatter lists it took 53, 17 and 4.9 ms.
            Route.DIRECT: Costs(fixed_s=2.0e-3, chunk_s=0.6e-3, piece_s=4.1e-6, bytes_per_s=390e9),
            # likewise in 240 to 258, 63 to 80 and 6.9 to 7.2 ms; the formula gives 254, 67 and 6.6 ms
            Route.PULL: Costs(fixed_s=3.0e-3, chunk_s=0.6e-3, piece_s=3.8e-6, bytes_per_s=390e9),
        }
    ),
)
_CPU: Final = Profile(
    "cpu",
    "two processes on two shared cores (x86-64), caches and arena in CPU memory (torch 2.13, NIXL over shared memory)",
    MappingProxyType(
        {
            # medians of four runs of whole fetches, which lay up to 40 % apart. 2 MiB in 2.5 to 3.2 ms; 64 MiB in 12.7
            # and 13.8 ms in pieces of 32 and 256 KiB, in 22 to 23 ms in pieces of 8 KiB, 512 B and 256 B (NHD to HND).
            Route.MAPPED: Costs(fixed_s=2.2e-3, chunk_s=0.0, piece_s=60e-9, bytes_per_s=6.0e9),
            # 2 MiB in 3.8 to 6.2 ms, 16 MiB in 15 to 20 ms, 64 MiB in 45 to 56 ms, whatever the pieces
            Route.STAGED: Costs(fixed_s=3.5e-3, chunk_s=0.5e-3, piece_s=40e-9, bytes_per_s=1.5e9),
            # 64 MiB in pieces of 256 KiB in 21 ms, of 32 KiB in 33 ms, of 8 KiB in 51 ms, of 512 B in 406 ms
            Route.DIRECT: Costs(fixed_s=2.2e-3, chunk_s=0.5e-3, piece_s=2.95e-6, bytes_per_s=3.4e9),
            # likewise in 20, 33, 49 and 402 ms
            Route.PULL: Costs(fixed_s=3.1e-3, chunk_s=0.5e-3, piece_s=2.95e-6, bytes_per_s=3.6e9),
        }
    ),
)
PROFILES: Final[Mapping[str, Profile]] = MappingProxyType({profile.name: profile for profile in (_H200, _CPU)})
"""Profiles by name; the first is the default of `kvxfer plan`."""


def profile_of(kind: str) -> Profile:
    """The profile that predictions of a worker begin with.

    Args:
        kind: "cpu" or "cuda": where its cache is.
    """
    return _H200 if kind == "cuda" else _CPU
