"""Real engines for tests, and the table of what they did."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]  # `make engines` has it

ROWS = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every configuration, model and fault: about an hour")


def pytest_configure(config):
    config.stash[ROWS] = []
    config.addinivalue_line("filterwarnings", "default")  # of vLLM and what it brings, which are not ours to mend
    config.addinivalue_line("markers", "full: real engines in more than what CI has time for")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if not config.getoption("--full") and item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="make engines ARGS=--full"))


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[ROWS]:
        terminalreporter.section("equal / asked | loaded / prompt tokens")
        for row in config.stash[ROWS]:
            terminalreporter.write_line(row)


@pytest.fixture
def table(request):
    """Lines that are printed at the end."""
    return request.config.stash[ROWS]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a model, by its name."""
    from make_model import make

    folder, made = tmp_path_factory.mktemp("models"), {}
    return lambda name: made.get(name) or made.setdefault(name, make(name, folder))


@pytest.fixture
def start():
    """Starts engines, which are ended after the test; their logs are shown if it failed."""
    started = []

    def begin(*engines):
        started.extend(engines)
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        return engines

    try:
        yield begin
    finally:
        for engine in started:
            engine.stop()
            print(engine.log, *engine.log.read_text().splitlines()[-40:], sep="\n")


@pytest.fixture(scope="session")
def alone(model, tmp_path_factory):
    """What an engine that does everything itself makes of prompts."""
    from pd import Alone, Engine

    folder = tmp_path_factory.mktemp("plain")
    engine = Alone(lambda name, dtype, *args: Engine("plain", model(name), folder, ("--dtype", dtype, *args)))
    yield engine
    engine.stop()
