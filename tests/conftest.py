"""What tests of several packages need."""

import gc
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: one whose torch has threads waits for the others'
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Compile before there are processes that run tests: each would compile all of it, as no other has yet."""
    if getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        halves = [[sys.executable, "-c", f"import kvxfer.copy.{name}"] for name in ("machine", "template")]
        for half in [subprocess.Popen(command) for command in halves]:
            half.wait()


def pytest_collection_finish() -> None:
    """Keep what collecting made from the garbage collector: some 11,000 tests, and the packages that they import.

    It lives as long as the session does, and each full pass took a good tenth of a second to find that out again.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # whoever counts what is left at exit finds nothing


@pytest.fixture
def quick_processes(monkeypatch):
    """Processes that would be spawned, and import torch and nixl for some seconds, are forked off a server."""
    import preloaded

    monkeypatch.setattr(multiprocessing, "get_context", lambda method: preloaded.Context())


@pytest.fixture
def no_settings(monkeypatch):
    """Whatever the environment has set is not seen."""
    for name in [name for name in os.environ if name.upper().startswith("KVXFER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def a_place_of_its_own(no_settings, monkeypatch, tmp_path_factory):
    """Temporary files go to a folder that must be empty afterwards; no process may be left, and no setting is seen."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert multiprocessing.active_children() == []
    assert list(folder.glob("kvxfer*")) == []


@pytest.fixture(scope="module")
def kind_of_ranks():
    """A module may have its own."""
    from far import Ranks

    return Ranks


@pytest.fixture(scope="module")
def process(kind_of_ranks):
    """Another process with ranks."""
    from far import Far

    far = Far(kind_of_ranks)
    yield far
    far.end()


@pytest.fixture
async def far(process):
    """The same, of which all ranks are closed afterwards."""
    yield process
    await process.close()


@pytest.fixture
async def near(kind_of_ranks):
    """Ranks in this process."""
    ranks = kind_of_ranks()
    yield ranks
    await ranks.close()


@pytest.fixture
def authority(tmp_path):
    from certificates import Authority

    return Authority(tmp_path)


@pytest.fixture
def command(monkeypatch, capsys):
    """`kvxfer` in this process, which has imported already what it needs: `command("config", KVXFER_RANK="1")`.

    Its exit code, its standard output and its standard error.
    """
    from kvxfer.tools import cli

    def run(*arguments, stdin="", **environment):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["kvxfer", *arguments])
            patched.setattr(sys, "stdin", io.StringIO(stdin))
            for name, value in environment.items():
                patched.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@contextmanager
def _listening(run):
    """A server that `run` has in a thread of its own, until that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)  # for whoever is not asked
        thread = threading.Thread(target=run, args=(server,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


@pytest.fixture
def speaking():
    """Something that says the same to whoever connects, whatever it is asked.

    `with speaking(answer) as address`: it answers as often as `times` says, and has done so at the end.
    """

    @contextmanager
    def speak(answer, times=1):
        def run(server):
            for _ in range(times):
                stream, _ = server.accept()
                with stream:
                    stream.recv(4096)
                    stream.sendall(answer)

        with _listening(run) as address:
            yield address

    return speak


@pytest.fixture
def dripping():
    """Something that begins an answer and goes on with it in drops: `with dripping(begins, drop) as address`."""

    @contextmanager
    def drip(begins, drop):
        given_up = threading.Event()

        def run(server):
            stream, _ = server.accept()
            with stream:
                stream.recv(4096)
                stream.sendall(begins)
                with suppress(ConnectionError):
                    while not given_up.wait(0.02):
                        stream.sendall(drop)

        with _listening(run) as address:
            try:
                yield address
            finally:
                given_up.set()

    return drip
