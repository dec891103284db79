"""Engines and token ranges as they are written on a command line."""

import pytest

from kvxfer.errors import ConfigError, TokensError
from kvxfer.tools.engine import EngineLayout
from kvxfer.tools.plan import parse_engine, parse_tokens


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", EngineLayout()),
        ("tp=4,pp=1,block=16,layout=NHD", EngineLayout(tp=4)),
        (" tp = 2 , block=64, layout=HND, cross-layer ", EngineLayout(tp=2, block=64, layout="HND", cross_layer=True)),
        ("pp=20+12,cp=2,cp-chunk=8,kernel-block=4", EngineLayout(pp=[20, 12], cp=2, cp_chunk=8, kernel_block=4)),
        ("layout=block kv head token dim", EngineLayout(layout="block kv head token dim")),
    ],
)
def test_an_engine(text, layout):
    assert parse_engine(text, "--prefill") == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=0", "tp=0 is not possible"),
        ("tp=\u0664", "tp=\u0664 is not possible: give a whole number"),
        ("tp=1000000", "tp, pp and cp make an engine of 1000000 ranks, but 16384 are the most"),
        ("tp", "'tp' is not understood: write tp=VALUE"),
        ("tp=1,tp=2", "tp is given twice"),
        ("cross-layer=yes", "write cross-layer alone, without a value"),
        ("blocks=16", "'blocks' is unknown: did you mean block?"),
        ("layout=BLNCH", "layout=BLNCH is not possible: it is no axis string and no layout: did you mean BLNHC?"),
        ("layout=block heads dim", "'heads' is not one of block, layer"),
    ],
)
def test_what_is_wrong_is_named_with_its_option(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_engine(text, "--decode")
    assert str(caught.value).startswith(f"--decode {text}: ")
    assert words in str(caught.value)


def test_token_ranges():
    assert parse_tokens("100") == range(100)
    assert parse_tokens("16:100") == range(16, 100)


@pytest.mark.parametrize("text", ["0", "0:0", "9:3", "-1", "1.5", "", ":", "1:", "1:2:3", "all", "\u0663"])
def test_what_is_no_token_range_is_refused(text):
    with pytest.raises(TokensError, match=f"--tokens {text} is not possible"):
        parse_tokens(text)
