"""Compiled code on disk: made once on a machine, by whom it belongs to, and never needed to work."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.copy import compiler

COPY = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
import numpy as np
from kvxfer.copy import walk
memory = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
region, rows, axis = [one.ctypes.data for one in memory], [0, 16, 1, 32, 0, 1], [16, 0, 0, 1, 1, 0]
header = np.asarray([0, 0, 16, 0, 0, 2, 2, 0, 0, 13, 15, 21, 1, *region, *rows, *axis], np.int64)
parts = np.asarray([header.ctypes.data, 1, 0, 0, 1, 2], np.int64)
walk.copy_parts(parts.ctypes.data, 2)
want = np.zeros(64, np.uint8)
want[16:32], want[:16] = memory[0][:16], memory[0][32:48]
assert (memory[1] == want).all(), memory[1]
"""


def child(home, code=COPY, **variables):
    """What a process with such a cache folder says as it copies."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def kept(home):
    """Files of machine code below a folder, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in home.rglob("*.nb?")}


def test_it_is_compiled_once_and_then_loaded_by_every_process(tmp_path):
    assert "function_compiled" in child(tmp_path)
    before = kept(tmp_path)
    assert before
    assert not child(tmp_path)
    assert kept(tmp_path) == before
    (folder,) = (tmp_path / "kvxfer").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    said = child(tmp_path)
    assert "compiled_code_not_kept" in said
    assert "others than this user may write there" in said
    assert kept(tmp_path) == before


def test_code_with_checks_of_bounds_is_other_code(tmp_path, monkeypatch):
    compiler._folder.cache_clear()
    monkeypatch.setattr(compiler._config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler._config, "BOUNDSCHECK", None)
    folders = {compiler._folder()}
    compiler._folder.cache_clear()
    monkeypatch.setattr(compiler._config, "BOUNDSCHECK", 1)
    folders.add(compiler._folder())
    compiler._folder.cache_clear()
    assert len(folders) == 2


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiler._config, "CACHE_DIR", str(tmp_path / "file"))
    compiler._folder.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert compiler._folder() is None
    compiler._folder.cache_clear()
    assert "NUMBA_CACHE_DIR" in caplog.text
    assert str(tmp_path / "file") in caplog.text


def test_without_numba_the_error_names_it(tmp_path):
    code = "import sys; sys.modules['numba'] = None\ntry: import kvxfer.copy.compiler\nexcept ImportError as error: {}"
    said = child(tmp_path, code.format("print(repr(error), file=sys.stderr)"))
    assert "MissingExtraError" in said
    assert "numba" in said


def test_words_are_of_any_width_and_numbers_of_32_bits():
    assert compiler.inlined(lambda: compiler.bits_of(compiler.float_of(0x1_3F80_0000)))() == 0x3F80_0000
    assert compiler.inlined(lambda: compiler.float_of(0x3F80_0000))() == pytest.approx(1.0)
