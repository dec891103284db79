"""The processes of two engines: one for both schedulers, and two for the ranks. vLLM's stand-in is theirs alone."""

import multiprocessing

BOTH = (0, 1)
ANSWER_SECONDS = 90


def _schedule(wire, wires):
    from vllm_scenarios import serve

    serve(wire, wires)


def _work(rank, wires):
    from vllm_rank import serve

    serve(rank, wires)


class Processes:
    """The three processes, and pipes between them: one for each rank of each engine."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        pipes = [[context.Pipe() for _ in BOTH] for _ in BOTH]
        self._wire, theirs = context.Pipe()
        self._processes = [
            context.Process(target=_schedule, args=(theirs, [[a for a, _ in ranks] for ranks in pipes])),
            *(context.Process(target=_work, args=(rank, [ranks[rank][1] for ranks in pipes])) for rank in BOTH),
        ]
        for process in self._processes:
            process.daemon = True
            process.start()
        for wire in (theirs, *(end for ranks in pipes for pair in ranks for end in pair)):
            wire.close()

    def play(self, name):
        self._wire.send(name)
        assert self._wire.poll(ANSWER_SECONDS), f"{name} does not end"
        return self._wire.recv()

    def end(self):
        for process in self._processes:
            process.kill()
            process.join(20)
            process.close()  # raises if it still runs
        self._wire.close()
