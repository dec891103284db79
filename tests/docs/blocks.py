"""Code blocks of pages, and running those that pages say can be run."""

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass

FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```\n', re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)*(?:\+cpu)?")


@dataclass(frozen=True)
class Block:
    """A code block; `shown` is the output that stands below it."""

    language: str
    title: str
    text: str
    shown: str | None


def blocks(page):
    """Code blocks of a page in their order. Output belongs to the block that it follows."""
    found = list(FENCE.finditer(page))
    for number, block in enumerate(found):
        following = found[number + 1] if number + 1 < len(found) else None
        answers = following is not None and following[1] == "text" and not page[block.end() : following.start()].strip()
        if block[1] != "text":
            yield Block(block[1], block[2] or "", block[3], following[3] if following is not None and answers else None)


def play(page, folder, variables, *, every=False):
    """Write the files of a page, run its commands, and compare what they say with what the page shows.

    Run is every block of commands that has a title, or output below it; or every one.
    """
    played = 0
    for block in blocks(page):
        if block.language in {"python", "toml"} and block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "sh" and (every or block.title or block.shown is not None):
            played += 1
            said = shell(block.text, folder, variables)
            if block.shown is not None:
                compare(said, block.shown)
    return played


def shell(commands, folder, variables):
    """What commands write to stdout, and to stderr."""
    line = ["bash", "-euo", "pipefail", "-c", commands]
    env = os.environ | variables
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def compare(said, shown):
    """The same lines but for numbers: nothing else on stdout, and all that the page shows on stdout or stderr."""
    written, expected = (Counter(alike(text)) for text in ("\n".join(said), shown))
    assert expected - written == Counter(), f"the page shows what is not said:\n{said[0]}\n{said[1]}"
    assert Counter(alike(said[0])) - expected == Counter(), f"the page does not show all that is said:\n{said[0]}"


def alike(text):
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines() if line.strip()]
