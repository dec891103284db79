"""Batches of tables, one by one: what a test looks at, spoils or copies by itself."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from packing import NOTHING, Launch, Tables, batch
from staged import Blank

from kvxfer.copy import binding
from kvxfer.copy.port import CopyJob
from kvxfer.copy.tables import Variant
from kvxfer.copy.template import Batch


def opened(batch: Any) -> list[Tables]:
    """The tables of each copy of a batch; those of a copy of nothing if there is none."""
    return [NOTHING] if batch is None else [_tables(batch, row.tolist()) for row in batch.said]


def _tables(made: Batch, said: list[int]) -> Tables:
    launches, blanks = list[Launch](), list[Blank]()
    for at in range(binding.TOLD, binding.TOLD + binding.LAUNCH_WORDS * said[binding.T_LAUNCHES], binding.LAUNCH_WORDS):
        elements, width, _, first, headers, tiles = said[at : at + binding.LAUNCH_WORDS]
        if elements >= len(made.variants.elements):  # it is a function of a GPU by now
            functions: Any = made.variants._functions
            elements, power = divmod(functions.tolist().index(elements) // binding.VARIANT_WORDS, binding.WIDTHS_OF_ONE)
            width = 1 << power
        launches.append(Launch(Variant(width, made.variants.elements[elements]), first, headers, tiles))
    first = len(said) - binding.BLANK_WORDS * binding.BLANKS
    for at in range(first, first + binding.BLANK_WORDS * said[binding.T_BLANKS], binding.BLANK_WORDS):
        blanks.append(Blank(*said[at : at + binding.BLANK_WORDS]))
    words = made.out[said[binding.T_BEGIN] : said[binding.T_STOP]]
    return Tables(words, tuple(launches), said[binding.T_WRITTEN], tuple(blanks))


def singly(jobs: Iterable[CopyJob]) -> list[CopyJob]:
    """Steps of a flow, each by itself."""
    found = list[CopyJob]()
    for job in jobs:
        if job.tables is None:
            found.append(job)
            continue
        for number, (tables, nbytes) in enumerate(zip(opened(job.tables), job.tables.nbytes.tolist(), strict=True)):
            post, sides = job.post, (() if job.post is None else (job.post.local, job.post.remote))
            if post is not None:
                local, remote = (replace(side, pieces=side.pieces[number : number + 1]) for side in sides)
                post = replace(post, local=local, remote=remote) if local.pieces[0, 1] else None
            found.append(replace(job, tables=batch(replace(tables, nbytes=nbytes)), post=post))
    return found
