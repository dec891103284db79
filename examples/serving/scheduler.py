"""What the model does next, with no thread and no tensor: the continuous batch as books.

A step is one token of each generation that runs, all in one pass, and beside it one chunk of one prompt. So a long
prompt delays the others by a chunk at a time, and whoever is done with its prompt joins the batch at the next step.
Prompts are taken in the order in which they came. Where more generations run than fit into a batch, they take turns.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a router reads of tokens here, and has no torch
    from kvxfer.tools.demo.model import Sequence

OnLayer = Callable[[int, "Sequence"], None]


class Said(NamedTuple):
    """A token that the model has chosen, and why it is the last one, if it is: `stop` or `length`."""

    token: int
    finish: str | None


@dataclass(eq=False, slots=True)
class Generation:
    """One request's way through the model.

    Attributes:
        sequence: Its blocks, and how many tokens of them hold K and V.
        pending: Tokens that the model has still to see: the rest of the prompt, or the token that it chose last.
        left: Tokens that it may still choose.
        stops: Tokens after which it ends.
        on_layer: Called in the model's thread for each layer of a chunk of the prompt.
    """

    sequence: "Sequence"
    pending: list[int]
    left: int
    stops: frozenset[int]
    on_layer: OnLayer | None = None


class Step(NamedTuple):
    """What the model does in one step: a chunk of a prompt, or one token each of several generations, or both."""

    prompt: Generation | None
    chunk: list[int]
    batch: list[Generation]


class Scheduler:
    """Generations that are under way.

    Args:
        batch: Generations in one pass at most.
        chunk: Tokens of a prompt in one pass at most.
    """

    def __init__(self, *, batch: int, chunk: int) -> None:
        self._batch = batch
        self._chunk = chunk
        self._prompts: deque[Generation] = deque()
        self._running: deque[Generation] = deque()

    def __len__(self) -> int:
        return len(self._prompts) + len(self._running)

    def add(self, generation: Generation) -> None:
        """From the next step on. A generation whose prompt's K and V came from elsewhere joins the batch at once."""
        whole = generation.sequence.tokens and len(generation.pending) == 1
        (self._running if whole else self._prompts).append(generation)

    def drop(self, generation: Generation) -> None:
        """No further step. Idempotent."""
        for queue in (self._prompts, self._running):
            if generation in queue:
                queue.remove(generation)

    def step(self) -> Step | None:
        """What to do next, if anything; `took` says how it went."""
        if not len(self):
            return None
        prompt = self._prompts[0] if self._prompts else None
        chunk = prompt.pending[: self._chunk] if prompt else []
        return Step(prompt, chunk, [self._running[i] for i in range(min(self._batch, len(self._running)))])

    def took(self, generation: Generation, tokens: int, following: int) -> Said | None:
        """The model has seen so many of a generation's pending tokens, and would continue with `following`.

        Returns:
            The token that the generation thereby says; None while the rest of its prompt is to come.
        """
        del generation.pending[:tokens]
        if generation.pending:
            return None
        self.drop(generation)
        generation.left -= 1
        if following in generation.stops:
            return Said(following, "stop")
        if generation.left <= 0:
            return Said(following, "length")
        generation.pending.append(following)
        self._running.append(generation)  # at the end: others that wait for a place in the batch are next
        return Said(following, None)
