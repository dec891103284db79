"""What UCX writes in a process of the doctor's. The tables here are UCX 1.23's own."""

import ctypes
import os
import textwrap

import pytest

from kvxfer.tools.doctor.lanes import LaneLog, complaints, is_tcp, lane_of
from kvxfer.tools.doctor.machine import UCX_LOG

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


@pytest.mark.parametrize(("text", "write", "read"), [
    ("", "", ""), (CMA, "cma/memory", ""), (READ, "", "sysv/memory"), (CMA + READ, "cma/memory", "sysv/memory"),
    (CMA + SPLIT, "52% on tcp/lo and 48% on tcp/eth0", ""), (SPLIT + CMA, "cma/memory", ""),
])  # fmt: skip
def test_the_last_table_counts_and_in_it_the_largest_size(text, write, read):
    assert (lane_of(lines(text), "write"), lane_of(lines(text), "read")) == (write, read)


@pytest.mark.parametrize(("lane", "slow"), [
    ("tcp/lo", True), ("52% on tcp/lo and 48% on tcp/eth0", True), ("cma/memory", False), ("cuda_ipc/cuda", False),
    ("50% on tcp/eth0 and 50% on rc_mlx5/mlx5_0:1", False), ("", False),
])  # fmt: skip
def test_sockets_alone_are_tcp(lane, slow):
    assert is_tcp(lane) is slow


def test_complaints_are_said_once():
    text = f"{HEAD}ucp_context.c:1 UCX  WARN  no transport bogus\n" * 2 + f"{HEAD}x.c:2 UCX  ERROR no device\n"
    assert complaints(text) == "no transport bogus; no device"
    assert complaints(lines(CMA)) == ""


def test_tables_of_two_threads_come_line_by_line():
    ours = lines(CMA).splitlines()[1:]
    others = lines(READ).replace(":0]", ":1]").splitlines()
    paired = [line for pair in zip(ours, others, strict=False) for line in pair]
    mixed = "\n".join(paired + ours[len(others) :])
    assert (lane_of(mixed, "write"), lane_of(mixed, "read")) == ("cma/memory", "sysv/memory")


def test_what_stands_in_a_buffer_of_libc_is_read_too(tmp_path):
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(str(tmp_path / UCX_LOG.format(process=os.getpid())).encode(), b"w"))
    try:
        libc.fputs(b"a line\n", file)
        assert LaneLog(tmp_path).text == "a line\n"
    finally:
        libc.fclose(file)
