"""The prefill side: offers the KV cache of one request and says its ticket. Start this one first.

    python examples/prefill.py ticket.json          # terminal 1; without a file the ticket goes to stdout
    python examples/decode.py ticket.json           # terminal 2

What to look at: this cache is NHD in blocks of 16 tokens, that of decode.py is HND in blocks of 32. Neither side says a
word about the other's layout, and both print the same digest.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import kvxfer
from kvxfer.geometry import group

TOKENS = 500


async def prefill(device: str, ticket_file: Path | None) -> None:
    cache = [torch.randn(2, 64, 16, 8, 128, device=device) for _ in range(4)]  # a layer: kv, block, token, head, dim
    tensors = group(cache, "kv block token head dim", heads=range(8))
    blocks = torch.randperm(64)[:32].tolist()  # 32 blocks of 16 tokens hold the request's 500
    async with kvxfer.Worker(tensors) as worker:
        after = torch.cuda.current_stream(device) if device != "cpu" else kvxfer.READY  # when blocks may be read
        offer = worker.offer("req-1", blocks, tokens=TOKENS, after=after, payload=digest(cache, blocks).encode())
        with published(offer.ticket, ticket_file):
            ending = await offer.released()  # from here on the blocks are ours again
        print(f"prefill: {type(ending).__name__}, {digest(cache, blocks)}", file=sys.stderr)


@contextmanager
def published(ticket: dict[str, object], ticket_file: Path | None) -> Iterator[None]:
    """Hand the ticket on, as a server would in its reply. Whoever holds it may fetch: it is a secret."""
    line = json.dumps(ticket)
    if ticket_file is None:
        print(line, flush=True)
        yield
        return
    fresh = ticket_file.with_name(f"{ticket_file.name}.new")  # nobody reads half of it
    fresh.touch(mode=0o600)
    fresh.write_text(line + "\n")
    fresh.replace(ticket_file)
    try:
        yield
    finally:
        ticket_file.unlink(missing_ok=True)


def digest(cache: list[torch.Tensor], blocks: list[int]) -> str:
    """Of K and V in the order layer, kv, token, head, dim, whatever the layout of the blocks."""
    tokens = torch.stack(cache)[:, :, blocks].flatten(2, 3)[:, :, :TOKENS]
    return hashlib.sha256(tokens.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Offer a request's KV cache.")
    parser.add_argument("ticket", type=Path, nargs="?", help="file to write the ticket to; stdout if left out")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    arguments = parser.parse_args()
    try:
        asyncio.run(prefill(arguments.device, arguments.ticket))
    except KeyboardInterrupt:
        sys.exit("prefill: given up; the ticket is worth nothing any more")
    except (kvxfer.KvxferError, OSError) as error:
        sys.exit(f"prefill: {type(error).__name__}: {error}")
