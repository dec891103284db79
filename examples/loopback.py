"""Both sides in one process, without NIXL and without a GPU: how a program that uses kvxfer tests itself.

    python examples/loopback.py

What to look at: `LoopbackTransport` takes NIXL's place, and everything else is the real thing. Virtual time makes the
test of a time-out free: two minutes of waiting for a ticket that nobody claims take no time at all.
"""

import torch

import kvxfer
from kvxfer.testing import DeterministicRuntime, LoopbackNetwork, LoopbackTransport, simulate


def worker(name: str, cache: torch.Tensor, network: LoopbackNetwork, runtime: DeterministicRuntime) -> kvxfer.Worker:
    tensors = [kvxfer.CacheTensor(cache, "kv block token head dim", layers=[0], heads=range(2))]
    config = kvxfer.Config(engine=name, arena_bytes="1MiB", chunk_bytes="64KiB")
    return kvxfer.Worker(tensors, config, transport=LoopbackTransport(name, network), runtime=runtime)


async def scenario(runtime: DeterministicRuntime) -> None:
    network = LoopbackNetwork()
    source, target = torch.randn(2, 8, 16, 2, 8), torch.zeros(2, 8, 16, 2, 8)
    async with (
        worker("prefill", source, network, runtime) as prefill,
        worker("decode", target, network, runtime) as decode,
    ):
        offer = prefill.offer("req-1", [4, 5, 6], tokens=40)
        await decode.fetch(prefill.engine.ticket("req-1"), [1, 2, 3], tokens=range(40))
        print("whole blocks equal:", torch.equal(source[:, [4, 5]], target[:, [1, 2]]))
        print("last 8 of 16 tokens of the third block untouched:", not target[:, 3, 8:].any())
        print("offer:", type(await offer.released()).__name__)

        network.refuse_next("decode")  # the next write to the decode side fails
        offer = prefill.offer("req-2", [0], tokens=16)
        try:
            await decode.fetch(prefill.engine.ticket("req-2"), [0], tokens=range(16))
        except kvxfer.TransferFailedError as error:
            print("fetch:", type(error).__name__, "of blocks", error.blocks)

        began = runtime.now()
        offer = prefill.offer("req-3", [7], tokens=16)
        print("offer:", type(await offer.released()).__name__, f"after {runtime.now() - began:.0f} s")


if __name__ == "__main__":
    simulate(scenario, seed=7)
