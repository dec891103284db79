"""Sizes, durations and lists as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import parse_affinity, parse_duration, parse_names, parse_optional, parse_size
from kvxfer.names import cpu_numbers


@pytest.mark.parametrize(("text", "size"), [
    (0, 0), (7, 7), ("7", 7), ("7B", 7), ("64KiB", 65536), ("64 kib", 65536), ("256MiB", 256 << 20), ("1GiB", 1 << 30),
    ("2TiB", 2 << 40), ("100MB", 100_000_000), ("1.5GiB", 3 << 29), ("0.1KB", 100), (" 1KB ", 1000),
    ("1e400", 10**400),  # a number all the same; its bound is for the field to check
])  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [
    (5, 5.0), (0.25, 0.25), ("5", 5.0), ("5s", 5.0), ("200ms", 0.2), ("2m", 120.0), ("1h", 3600.0), ("1.5 S", 1.5),
    ("9us", 9e-6),
])  # fmt: skip
def test_durations(text, seconds):
    parsed = parse_duration(text)
    assert parsed == seconds
    assert isinstance(parsed, float)


@pytest.mark.parametrize("given", ["1e400s", "-1e400", "1" + "0" * 400, 10**400, -(10**400)])
def test_a_duration_beyond_every_float_is_for_the_field_to_refuse(given):
    assert parse_duration(given) == float("-inf" if str(given).startswith("-") else "inf")


@given(st.integers(min_value=0, max_value=2**40), st.sampled_from([("KiB", 1 << 10), ("MB", 10**6), ("", 1)]))
def test_a_size_is_exact(number, unit):
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


@given(st.integers(min_value=0, max_value=10**9))
def test_a_duration_is_the_nearest_float(milliseconds):
    assert parse_duration(f"{milliseconds}ms") == milliseconds / 1000


def test_lists():
    assert parse_names("UCX, GDS,") == ("UCX", "GDS")
    assert parse_names('["a,b", "c"]') == ["a,b", "c"]
    assert parse_names("") == ()
    assert parse_names(("x",)) == ("x",)
    with pytest.raises(ValueError, match="not valid JSON"):
        parse_names("[a")


@pytest.mark.parametrize(
    ("text", "value"), [("", None), ("None", None), (" none ", None), ("nonesuch", "nonesuch"), (0, 0)]
)
def test_nothing_is_written_as_none(text, value):
    assert parse_optional(text) == value


@pytest.mark.parametrize(("value", "meant"), [
    ("auto", "auto"), (" OFF ", "off"), ("0-3,16", (0, 1, 2, 3, 16)), ("7, 1 , 3-4,3", (1, 3, 4, 7)), ("5", (5,)),
    (5, (5,)), ("[2, 0]", (0, 2)), ([2, 0, 2], (0, 2)), (range(3), (0, 1, 2)), ({4, 1}, (1, 4)),
])  # fmt: skip
def test_affinities(value, meant):
    assert parse_affinity(value) == meant


ENDLESS = ["1e999999999", "1e-999999999", "1e1000"]
NONE = {
    (parse_size, r"size|whole number of bytes"): [
        "", "MiB", "1K", "1XiB", "1 Mi B", "0.1KiB", "nan", 1.5, True, None, "1,5MiB",
    ],
    (parse_duration, "duration"): [
        "", "s", "5x", "5 days", "1m30s", "inf", float("inf"), float("nan"), True, None, [1],
    ],
    (parse_size, "a number of"): ENDLESS,
    (parse_duration, "a number of"): ENDLESS,
    (parse_affinity, r"affinity is|JSON"): [
        "", "cores", "1-", "-1", "3-1", "1,,2", "0-3:2", "1e3", [], "[]", ["0-3"], [True], [1.0], [-1], -1, 2.5, True,
        None, {1: 2}, b"\1", "[1", [10**9],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("parse", "words", "given"), [(*how, one) for how, those in NONE.items() for one in those])
def test_what_is_none_is_refused(parse, words, given):
    with pytest.raises(ValueError, match=words):
        parse(given)


@given(st.sets(st.integers(0, 3000), min_size=1))
def test_lists_of_cpus_as_the_kernel_writes_them(cpus):
    runs: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        runs = [*runs[:-1], (runs[-1][0], cpu)] if runs and runs[-1][1] == cpu - 1 else [*runs, (cpu, cpu)]
    text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    assert cpu_numbers(text + "\n") == tuple(sorted(cpus))
    assert cpu_numbers(",".join(map(str, cpus))) == tuple(sorted(cpus))
