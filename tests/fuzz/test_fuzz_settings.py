"""Settings of random names and values: as arguments, in the environment, in files. A `Config`, or a `ConfigError`."""

import contextlib
import json
import os
from random import Random
from time import thread_time

import campaign
import pytest
from mutation import NUMBERS, OTHERS

from kvxfer import Config
from kvxfer.config import leaves
from kvxfer.errors import ConfigError, TokensError
from kvxfer.tools.plan import parse_engine, parse_tokens

NAMES = [name for name, _ in leaves(Config)]
TEXTS = [
    *("", " ", "none", "auto", "true", "0", "-1", "1e999", "1e-999", "nan", "inf", "0x10", "٣", "1_000", "256MiB"),
    *("9" * 5000, "1e999MiB", "5s", "1e300h", "unix", "tcp:*:0", "tcp:[::1]:99999", "a,b,,", "[", "[1,2", '{"a":{}}'),
    *(
        "[" * 5000,
        '{"a":' * 5000,
        "[[[]]]",
        "x" * 100_000,
        "\u202e",
        "é",
        "0-99999",
        "0-",
        ",",
        "full",
        "staged",
        "UCX",
    ),
]
SECONDS = 0.5


def value(draw: Random):
    match draw.randrange(5):
        case 0:
            return draw.choice(NUMBERS)
        case 1:
            return draw.choice(OTHERS)
        case 2:
            return draw.choice(TEXTS) + draw.choice(TEXTS[:20])
        case _:
            return draw.choice(TEXTS)


def name(draw: Random):
    known = draw.choice(NAMES)
    match draw.randrange(8):
        case 0:
            return known[:-1]
        case 1:
            return known + draw.choice(("s", ".", "__", ".x"))
        case 2:
            return draw.choice(("x" * 20_000, "", "-", "fabric", "é", known * 50))
        case _:
            return known


def nested(pairs):
    """Dotted names as groups."""
    found = {}
    for dotted, given in pairs:
        group, _, last = dotted.partition(".")
        if last and not isinstance(found.get(group, {}), dict):
            continue
        if last:
            found.setdefault(group, {})[last] = given
        else:
            found[group] = given
    return found


def tried(build):
    """Build it: well, or with the one error that says what is wrong, and soon."""
    began = thread_time()
    try:
        build()
    except ConfigError as error:
        campaign.is_short(error, 100_000)
    assert thread_time() - began < SECONDS


def cases(what, count):
    for number in range(count):
        draw = Random(f"{campaign.SEED}/{what}/{number}")
        yield number, draw, [(name(draw), value(draw)) for _ in range(draw.choice((1, 1, 2, 4)))]


def noted(number, pairs, build):
    try:
        tried(build)
    except BaseException as error:
        error.add_note(f"FUZZ_SEED={campaign.SEED}, case {number}: {pairs!r:.1000}")
        raise


COUNT = max(300, campaign.FRAMES // 1000)


def test_arguments():
    for number, _, pairs in cases("arguments", COUNT):
        noted(number, pairs, lambda pairs=pairs: Config(**nested(pairs)))


def test_environment(monkeypatch):
    for number, draw, pairs in cases("environment", COUNT):
        with monkeypatch.context() as patch:
            for dotted, given in pairs:
                variable = draw.choice(("KVXFER_", "kvxfer_")) + dotted.upper().replace(".", "__")
                text = given if isinstance(given, str) else str(given)
                try:
                    patch.setitem(os.environ, variable, text)
                except (ValueError, OSError, UnicodeError):
                    continue
            noted(number, pairs, Config)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_files(suffix, tmp_path):
    path = tmp_path / f"kvxfer.{suffix}"
    for number, draw, pairs in cases(suffix, COUNT):
        text = written(nested(pairs), suffix)
        if draw.random() < 0.3:
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(("[", "{", '"', "\x00", "=", "[" * 5000, "\ufeff")) + text[at:]
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        noted(number, pairs, lambda: Config.load(path))


def written(values, suffix):
    text = json.dumps(values, default=repr)
    if suffix == "json":
        return text
    return "\n".join(f"{json.dumps(key)} = {json.dumps(given, default=repr)}" for key, given in values.items())


TERMS = ["tp=4", "pp=2", "pp=20+12", "cp=2", "cp-chunk=16", "block=16", "layout=HND", "cross-layer", "kernel-block=8"]
PARTS = [*TEXTS[:20], "=", ",", "+", ":", "9" * 5000, "1e9", "block token dim", "kv block layer head token dim"]


def test_engines_and_tokens_of_a_command_line():
    for number in range(COUNT):
        draw = Random(f"{campaign.SEED}/engine/{number}")
        terms = draw.sample(TERMS, k=draw.randrange(4))
        for at in range(len(terms)):
            if draw.random() < 0.4:
                terms[at] = terms[at].partition("=")[0] + draw.choice(("=", "", "==")) + draw.choice(PARTS)
        text = ",".join(terms)
        noted(number, text, lambda text=text: parse_engine(text, "--to"))
        tokens = draw.choice(PARTS) + draw.choice((":", "")) + draw.choice(PARTS)
        with contextlib.suppress(TokensError):
            parse_tokens(tokens)
