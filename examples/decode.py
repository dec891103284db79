"""The decode side: takes the ticket of prefill.py and brings the cache into its own blocks. See there.

    python examples/decode.py ticket.json           # without a file the ticket is read from stdin

What to look at: one `await`, and then the blocks hold the request, in another layout and another block size.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import kvxfer
from kvxfer.geometry import group

TOKENS = 500


async def decode(device: str, ticket: dict[str, Any]) -> bool:
    cache = [torch.zeros(2, 32, 8, 32, 128, device=device) for _ in range(4)]  # a layer: kv, block, head, token, dim
    tensors = group(cache, "kv block head token dim", heads=range(8))
    blocks = torch.randperm(32)[:16].tolist()  # 16 blocks of 32 tokens
    async with kvxfer.Worker(tensors) as worker:
        after = torch.cuda.current_stream(device) if device != "cpu" else kvxfer.READY  # when they may be written
        result = await worker.fetch(ticket, blocks, tokens=range(TOKENS), after=after, timeout=60)
    stats = result.stats
    print(f"decode: {stats.bytes} bytes by {stats.route} in {stats.duration * 1e3:.1f} ms")
    print(f"decode: {digest(cache, blocks)} here, {result.payload.decode()} there")
    return digest(cache, blocks) == result.payload.decode()


def digest(cache: list[torch.Tensor], blocks: list[int]) -> str:
    """Of K and V in the order layer, kv, token, head, dim, whatever the layout of the blocks."""
    tokens = torch.stack(cache)[:, :, blocks].transpose(3, 4).flatten(2, 3)[:, :, :TOKENS]
    return hashlib.sha256(tokens.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def received(ticket_file: Path | None) -> dict[str, Any]:
    """What prefill.py published; it may take its time."""
    if ticket_file is None:
        return json.loads(sys.stdin.readline() or sys.exit("decode: no ticket came"))
    if not ticket_file.exists():
        print(f"decode: waiting for {ticket_file}, which prefill.py writes; Ctrl-C ends it", file=sys.stderr)
    while True:
        try:
            return json.loads(ticket_file.read_text())
        except FileNotFoundError:
            time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch a request's KV cache.")
    parser.add_argument("ticket", type=Path, nargs="?", help="file that prefill.py writes; stdin if left out")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    arguments = parser.parse_args()
    try:
        sys.exit(0 if asyncio.run(decode(arguments.device, received(arguments.ticket))) else 1)
    except KeyboardInterrupt:
        sys.exit("decode: given up")
    except (kvxfer.KvxferError, OSError, ValueError) as error:  # the last one: what is there is no JSON
        sys.exit(f"decode: {type(error).__name__}: {error}")
