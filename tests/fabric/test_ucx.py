"""Lanes are read off what UCX writes. The tables here are UCX 1.23's own."""

import textwrap

import pytest

from kvxfer.fabric.ucx import Reader, Table, complaints, is_tcp, lane_of

HEAD = "[1795331872.849208] [vm:18037:0]   "
CMA = """
    +--------+-------------+-----------------------------------+
    | kvxfer-9a2242b6a708e2ee13bf92fa intra-node cfg#1         |
    | remote memory write by ucp_put* from host memory to host |
    +--------+-------------+-----------------------------------+
    | Range  | Description |              Config               |
    +--------+-------------+-----------------------------------+
    | 0..inf | zero-copy   | cma/memory                        |
    +--------+-------------+-----------------------------------+
    +------------+--------------------+----------------+
    | kvxfer-9a2242b6a708e2ee13bf92fa intra-node cfg#1 |
    | active message by ucp_am_send* from host memory  |
    +------------+--------------------+----------------+
    |   Range    |    Description     |     Config     |
    +------------+--------------------+----------------+
    |          0 | short              | tcp/lo         |
    | 16516..inf | multi-frag copy-in | tcp/lo         |
    +------------+--------------------+----------------+
"""
SPLIT = """
    | kvxfer-9a2242b6a708e2ee13bf92fa intra-node cfg#2                      |
    | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/GPU1   |
    +-----------+-------------+---------------------------------------------+
    |   0..2047 | short       | tcp/lo                                      |
    | 2048..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0           |
"""
READ = """
    | kvxfer-9a2242b6a708e2ee13bf92fa intra-node cfg#3                 |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | 0..inf | zero-copy   | sysv/memory                               |
"""


def lines(text):
    return "".join(f"{HEAD}{line}\n" for line in textwrap.dedent(text).strip().splitlines())


@pytest.mark.parametrize(
    ("text", "write", "read"),
    [
        ("", "", ""),
        (CMA, "cma/memory", ""),
        (READ, "", "sysv/memory"),
        (CMA + READ, "cma/memory", "sysv/memory"),
        (CMA + SPLIT, "52% on tcp/lo and 48% on tcp/eth0", ""),
        (SPLIT + CMA, "cma/memory", ""),
    ],
)
def test_the_last_table_counts_and_in_it_the_largest_size(text, write, read):
    assert (lane_of(lines(text), "write"), lane_of(lines(text), "read")) == (write, read)


@pytest.mark.parametrize(
    ("lane", "slow"),
    [
        ("tcp/lo", True),
        ("52% on tcp/lo and 48% on tcp/eth0", True),
        ("cma/memory", False),
        ("cuda_ipc/cuda", False),
        ("50% on tcp/eth0 and 50% on rc_mlx5/mlx5_0:1", False),
        ("", False),
    ],
)
def test_sockets_alone_are_tcp(lane, slow):
    assert is_tcp(lane) is slow


def test_complaints_are_said_once():
    text = f"{HEAD}ucp_context.c:1 UCX  WARN  no transport bogus\n" * 2 + f"{HEAD}x.c:2 UCX  ERROR no device\n"
    assert complaints(text) == "no transport bogus; no device"
    assert complaints(lines(CMA)) == ""


def test_tables_of_two_threads_come_line_by_line_and_in_parts():
    ours = lines(CMA).splitlines()
    others = lines(READ + "    +---+\n").replace(":0]", ":1]").replace("9a22", "9a23").splitlines()
    mixed = [line for pair in zip(ours, others, strict=False) for line in pair] + ours[len(others) :]
    reader = Reader(18037)
    found = [one for line in mixed for one in reader.read([line])]
    agent = "kvxfer-9a2242b6a708e2ee13bf92fa"
    assert found == [
        Table(agent.replace("9a22", "9a23"), "read", "host", "host", "sysv/memory"),
        Table(agent, "write", "host", "host", "cma/memory"),
    ]
    assert list(Reader(1).read(mixed)) == [], "of another process, which writes to the same place"


@pytest.mark.parametrize("process", [7, 18037, 4194304])
def test_lines_of_a_process_are_known_whatever_room_its_number_takes(process):
    written = [line.replace("18037", f"{process:<5}") for line in lines(CMA).splitlines()]
    assert len(list(Reader(process).read(written))) == 1


def test_kinds_of_memory_are_named_without_their_device():
    reader = Reader()
    assert list(reader.read(lines(SPLIT).splitlines())) == []
    (table,) = reader.end()
    assert (table.near, table.far) == ("cuda", "cuda")
