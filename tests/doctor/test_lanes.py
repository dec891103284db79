"""The doctor's file of what UCX writes."""

import ctypes
import os

from kvxfer.doctor.lanes import LaneLog
from kvxfer.doctor.machine import UCX_LOG


def test_only_what_comes_later_counts(tmp_path):
    file = tmp_path / UCX_LOG.format(process=os.getpid())
    log = LaneLog(tmp_path)
    assert log.text == ""
    file.write_text("a line\n")
    assert log.text == "a line\n"
    log.forget()
    assert log.text == ""


def test_what_stands_in_a_buffer_of_libc_is_read_too(tmp_path):
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(str(tmp_path / UCX_LOG.format(process=os.getpid())).encode(), b"w"))
    try:
        libc.fputs(b"a line\n", file)
        assert LaneLog(tmp_path).text == "a line\n"
    finally:
        libc.fclose(file)
