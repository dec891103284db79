"""Compiled code on disk: made once on a machine, by whom it belongs to, and never needed to work."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer.copy import compiler
from kvxfer.copy.compiler import bits_of, compiled, float_of, inlined, load
from kvxfer.errors import MissingExtraError

COMPILED = Path(compiler.__file__).parent
COPY = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
import numpy as np
from kvxfer.copy import walk
word, key, room, sums = np.asarray([5]), np.asarray([3]), np.zeros(1, np.int64), np.zeros(2, np.int64)
axis, region, row = [1, 0, 0, 8, 8, 0], [word.ctypes.data, 0], [0, 0, 1]
head = np.asarray([0, 0, 1, 1, 0, 0, 1, 1, 18, 24, 26, 0, 0, 0, 0, 0, 0, 1, *axis, *region, *row])
walk.add_up(head.ctypes.data, 1, 8, 0, 0, key.ctypes.data, room.ctypes.data, sums.ctypes.data)
assert sums[0] == sums[1] != 0, sums
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


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory):
    """A folder of compiled code."""
    home = tmp_path_factory.mktemp("home")
    child(home)
    return home / "kvxfer"


def test_it_is_compiled_once_and_then_loaded_by_every_process(tmp_path):
    said = child(tmp_path)
    assert said.index("compilation_began") < said.index("function_compiled")  # what takes long is announced
    before = kept(tmp_path)
    assert before
    again = child(tmp_path)
    assert "compiled_code_not_kept" not in again
    assert "compilation_began" not in again
    assert kept(tmp_path) == before
    (folder,) = (tmp_path / "kvxfer").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("kind", "damage"), [("nbi", lambda file: file.write_bytes(b"")), ("nbc", lambda file: os.truncate(file, 100))]
)
def test_a_damaged_file_is_compiled_past_and_named(tmp_path, damage, kind, compiled_before):
    shutil.copytree(compiled_before, tmp_path / "kvxfer", dirs_exist_ok=True)
    for file in (tmp_path / "kvxfer").rglob(f"*.{kind}*" if kind == "nbc" else "*.nbi"):
        damage(file)
    said = child(tmp_path)
    assert "compiled_code_not_kept" in said
    assert str(tmp_path) in said


def test_a_disk_that_is_full_is_no_reason_not_to_copy(tmp_path):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))" + COPY
    said = child(tmp_path, limited)
    assert "compiled_code_not_kept" in said


@pytest.fixture
def kept_in(monkeypatch):
    """In which folder code of a package would be kept."""
    monkeypatch.setattr(compiler._config, "CACHE_DIR", "")

    def folder(package=COMPILED):
        compiler.cache_folder.cache_clear()
        return compiler.cache_folder(package)

    yield folder
    compiler.cache_folder.cache_clear()


@pytest.mark.parametrize("place", ["", "kvxfer"])
def test_a_folder_in_whose_place_others_may_put_one_is_not_used(tmp_path, monkeypatch, caplog, kept_in, place):
    parent = tmp_path / "home" / place
    parent.mkdir(parents=True)
    parent.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with caplog.at_level(logging.WARNING):
        assert kept_in() is None
    assert f"others than this user may write to {parent}" in caplog.text
    parent.chmod(0o1777)  # as that for temporary files: what is there is its owner's
    found = kept_in()
    assert found is not None
    assert found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o777)
    assert kept_in() is None


def test_a_user_without_a_home_compiles_anew(monkeypatch, caplog, kept_in):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    with caplog.at_level(logging.WARNING):
        assert kept_in() is None
    assert "no home" in caplog.text


def test_numba_that_may_not_compile_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(compiler._config, "DISABLE_JIT", 1)
    with pytest.raises(MissingExtraError, match="NUMBA_DISABLE_JIT"):
        compiler.compiled("void()")


def test_code_with_checks_of_bounds_and_that_of_a_package_that_has_changed_is_other_code(
    tmp_path, monkeypatch, kept_in
):
    monkeypatch.setattr(compiler._config, "CACHE_DIR", str(tmp_path / "kept"))
    folders = {kept_in()}
    monkeypatch.setattr(compiler._config, "BOUNDSCHECK", 1)
    folders.add(kept_in())
    for text in ("LINE = 1", "LINE = 2"):
        (tmp_path / "source.py").write_text(text)
        folders.add(kept_in(tmp_path))
    assert len(folders) == 4


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path, monkeypatch, caplog, kept_in):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiler._config, "CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert kept_in() is None
    assert "NUMBA_CACHE_DIR" in caplog.text
    assert str(tmp_path / "file") in caplog.text


def test_without_numba_the_error_names_it(tmp_path):
    code = "import sys; sys.modules['numba'] = None\ntry: import kvxfer.copy.compiler\nexcept ImportError as error: {}"
    said = child(tmp_path, code.format("print(repr(error), file=sys.stderr)"))
    assert "MissingExtraError" in said
    assert "numba" in said


@compiled("int64(int64)")
def _bits(number):
    return bits_of(float_of(number))


@compiled("float32(int64)")
def _float(number):
    return float_of(number)


def test_words_are_of_any_width_and_numbers_of_32_bits():
    assert _bits(0x1_3F80_0000) == 0x3F80_0000
    assert _float(0x3F80_0000) == pytest.approx(1.0)


@inlined
def _entry(table, at, count, instead):
    if at >= count:
        return 1, 0
    entry = table + at * 48
    return instead if load(entry + 40) else load(entry), load(entry + 24)


@compiled("int64(int64, int64, int64)")
def _first_entry(table, count, instead):
    length, step = _entry(table, 0, count, instead)
    further = 1
    for at in range(1, count):
        further *= _entry(table, at, count, instead)[0]
    return (length * 100 + step) * further


def test_numbers_are_addresses_wherever_they_come_from():
    """LLVM takes them for steps from no object, which nobody may read, unless it is told otherwise."""
    words = np.array([3, 0, 0, 7, 0, 0], np.int64)
    assert _first_entry(words.ctypes.data, 1, 5) == 307
    words[5] = 1
    assert _first_entry(words.ctypes.data, 1, 5) == 507
