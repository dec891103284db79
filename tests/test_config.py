"""Settings: where they come from, what is refused and how it is said, and the bounds that follow from them."""

import json
import pickle
import traceback
from pathlib import Path

import pytest
from pydantic import ValidationError

import kvxfer
from kvxfer.config import Config, FabricConfig, leaves
from kvxfer.errors import ConfigError, TicketError
from kvxfer.memory.books import ALIGNMENT
from kvxfer.names import MAX_WORLD
from kvxfer.tickets import RankCard

pytestmark = pytest.mark.usefixtures("no_settings")

SECRET = "correct-horse-battery-staple"


@pytest.fixture
def environment(monkeypatch):
    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.fixture
def toml(tmp_path):
    def write(text, name="kvxfer.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def refusal(**arguments):
    with pytest.raises(ConfigError) as caught:
        Config(**arguments)
    return str(caught.value)


# --- sources


def test_defaults_are_sound_and_named_so():
    config = Config()
    assert (config.arena_bytes, config.chunk_bytes) == (512 * 2**20, 32 * 2**20)
    assert set(config.sources().values()) == {"default"}


@pytest.mark.parametrize(
    ("arena", "chunk"), [("256MiB", 32 << 20), ("4GiB", 32 << 20), ("64MiB", 16 << 20), (0, 32 << 20)]
)
def test_chunks_are_cut_for_the_arena_unless_somebody_says(arena, chunk):
    config = Config(arena_bytes=arena)
    assert (config.chunk_bytes, config.sources()["chunk_bytes"]) == (chunk, "default")
    config = Config(arena_bytes="1KiB", chunk_bytes=512)
    assert (config.chunk_bytes, config.sources()["chunk_bytes"]) == (512, "argument")


def test_the_order_of_sources(environment, toml):
    path = toml(
        'window = 2\nmodel = "file"\nengine = "file"\n'
        '[fabric]\nnum_workers = 2\nmax_descriptors = 2\nbackend_params = {UCX = {file = "1"}}\n'
    )
    environment(KVXFER_MODEL="variable", KVXFER_ENGINE="variable", KVXFER_FABRIC__NUM_WORKERS="3")
    params = {"UCX": {"argument": "2"}}  # one setting, from one source
    config = Config.load(path, engine="argument", fabric={"devices": ["mlx5_0"], "backend_params": params})
    assert (config.engine, config.model, config.window, config.copy_ctas) == ("argument", "variable", 2, 24)
    fabric = FabricConfig(devices=("mlx5_0",), num_workers=3, max_descriptors=2, backend_params=params)
    assert config.fabric == fabric
    said = {
        "argument": {"engine", "fabric.devices", "fabric.backend_params"},
        "KVXFER_MODEL": {"model"},
        "KVXFER_FABRIC__NUM_WORKERS": {"fabric.num_workers"},
        str(path): {"window", "fabric.max_descriptors"},
    }
    of = {name: source for source, names in said.items() for name in names}
    assert config.sources() == {name: of.get(name, "default") for name, _ in leaves(Config)}


def test_the_file_can_be_named_by_a_variable_and_an_argument_wins(environment, toml):
    environment(KVXFER_CONFIG_FILE=str(toml("window = 5")))
    assert Config().window == 5
    assert Config.load().window == 5
    assert Config().sources()["window"].endswith(".toml")
    assert Config.load(toml('{"window": 6}', "other.json")).window == 6
    environment(KVXFER_CONFIG_FILE="")
    assert set(Config().sources().values()) == {"default"}


def test_a_setting_of_a_group_may_have_its_whole_name(toml):
    file = toml('{"fabric.num_workers": 2, "fabric": {"devices": ["mlx5_0"]}}', "settings.json")
    fabric = FabricConfig(num_workers=2, devices=("mlx5_0",))
    assert Config.load(file).fabric == fabric
    assert Config(**{"fabric.num_workers": 2}, fabric={"devices": "mlx5_0"}).fabric == fabric
    with pytest.raises(ConfigError, match=r"'fabric.num_wrokers' is not a setting; did you mean fabric.num_workers\?"):
        Config(**{"fabric.num_wrokers": 2})


def test_a_file_may_begin_with_a_mark_of_its_encoding(toml):
    for text, name in (("window = 6", "a.toml"), ('{"window": 6}', "b.json")):
        assert Config.load(toml(f"\ufeff{text}", name)).window == 6


def test_a_path_that_no_file_can_have_is_not_quoted_whole():
    with pytest.raises(ConfigError, match=r"file xxx.*\.\.\. cannot be read: File name too long") as error:
        Config(config_file="x" * 100_000)
    assert len(str(error.value)) < 5_000


def test_variables_in_any_case_and_of_every_kind(environment):
    environment(
        kvxfer_Arena_Bytes="1GiB",
        KVXFER_PEER_TIMEOUT="500ms",
        KVXFER_ADVERTISE="none",
        KVXFER_ALLOW_PEERS="unix:/run/*, tcp:10.*:*",
        KVXFER_FABRIC__BACKENDS='["UCX", "POSIX"]',
        KVXFER_FABRIC__BACKEND_PARAMS='{"UCX": {"num_threads": "2"}}',
        KVXFER_SECRET=SECRET,
    )
    config = Config()
    assert config.arena_bytes == 2**30
    assert config.peer_timeout == 0.5
    assert config.advertise is None
    assert config.allow_peers == ("unix:/run/*", "tcp:10.*:*")
    assert config.fabric.backends == ("UCX", "POSIX")
    assert config.fabric.backend_params == {"UCX": {"num_threads": "2"}}
    assert config.secret is not None
    assert config.secret.get_secret_value() == SECRET
    assert config.sources()["arena_bytes"] == "kvxfer_Arena_Bytes"


def test_a_group_in_one_variable_yields_to_its_single_ones(environment):
    environment(KVXFER_FABRIC='{"num_workers": 2, "max_descriptors": 9}', KVXFER_FABRIC__NUM_WORKERS="7")
    config = Config()
    assert (config.fabric.num_workers, config.fabric.max_descriptors) == (7, 9)
    assert config.sources()["fabric.max_descriptors"] == "KVXFER_FABRIC"
    assert config.sources()["fabric.num_workers"] == "KVXFER_FABRIC__NUM_WORKERS"
    config = Config(fabric=FabricConfig(max_descriptors=5))  # which counts with what was set on it
    assert (config.fabric.num_workers, config.fabric.max_descriptors) == (7, 5)


def test_frozen_equal_and_picklable():
    config = Config(rank=1, world=2, fabric={"num_workers": 2})
    with pytest.raises(ValidationError, match="frozen"):
        config.rank = 0
    with pytest.raises(ValidationError, match="frozen"):
        config.fabric.num_workers = 3
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.sources() == config.sources()


# --- names


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("KVXFER_RNAK", "did you mean KVXFER_RANK?"),
        ("kvxfer_chunk_byte", "did you mean KVXFER_CHUNK_BYTES?"),
        ("KVXFER_FABRIC_BACKENDS", "did you mean KVXFER_FABRIC__BACKENDS?"),
        ("KVXFER_FABRIC__BACKEND", "did you mean KVXFER_FABRIC__BACKENDS?"),
        ("KVXFER_ZZZZZZ", "`kvxfer config` prints all settings"),
    ],
)
def test_an_unknown_variable_gives_the_nearest_name_or_points_to_the_list(environment, variable, hint):
    environment(**{variable: "1"})
    message = refusal()
    assert variable in message
    assert hint in message


def test_one_variable_in_two_cases(environment):
    environment(KVXFER_WINDOW="1", kvxfer_window="2")
    assert "both set, to different values" in refusal()
    environment(kvxfer_window="1")
    assert Config().window == 1


# --- files


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.toml", "window = ", "cannot be parsed"), ("a.json", "{", "cannot be parsed"),
    ("a.yaml", "window: 1", "name it .toml or .json"),
    ("a.toml", 'config_file = "b.toml"', "'config_file' is not a setting"), ("a.toml", "rnak = 1", "did you mean rank"),
    ("a.toml", "copy_ctas = 0", "copy_ctas is 0 (from "),
])  # fmt: skip
def test_files_that_cannot_be_used(toml, name, text, said):
    path = toml(text, name)
    message = refusal(config_file=path)
    assert said in message
    assert str(path) in message


def test_a_file_that_is_not_there(tmp_path):
    assert "No such file" in refusal(config_file=tmp_path / "none.toml")
    for wrong in (1, b"settings.toml", ["settings.toml"], {}):
        assert "give the path of a TOML or JSON file" in refusal(config_file=wrong)


# --- values


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rnak": 1}, "did you mean rank?"),
        ({"chunkbytes": 1}, "did you mean chunk_bytes?"),
        ({"fabric": {"backend": "UCX"}}, "did you mean fabric.backends?"),
        ({"window": 0}, "window is 0: set it to at least 1"),
        ({"rank": -1}, "rank is -1: set it to at least 0"),
        ({"route": "fast"}, "route is 'fast': set it to 'auto', 'mapped', 'staged', 'direct' or 'pull'"),
        ({"engine": ""}, "engine is '': give at least 1 character"),
        ({"grant_lease": 0}, "grant_lease is 0.0: set it to at least 0.001"),
        ({"grant_lease": "5 parsecs"}, "grant_lease is '5 parsecs': a duration is"),
        ({"arena_bytes": "256 mib b"}, "arena_bytes is '256 mib b': a size is"),
        ({"listen": "tcp:host"}, "listen is 'tcp:host': an endpoint is"),
        ({"listen": "unix:/\udc80"}, r"listen is 'unix:/\udc80': set it to text in UTF-8"),
        ({"allow_peers": ["unix:/\udc80"]}, r"allow_peers.0 is 'unix:/\udc80': set it to text in UTF-8"),
        ({"fabric": {"devices": ["\udc80"]}}, r"fabric.devices.0 is '\udc80': set it to text in UTF-8"),
        ({"fabric": {"devices": [""]}}, "fabric.devices.0 is '': give at least 1 character"),
        ({"tls": {"authorities": "~nobody here/x"}}, "tls.authorities is '~nobody here/x', which cannot be read"),
        ({"config_file": "~nobody here/x.toml"}, "configuration file ~nobody here/x.toml cannot be read"),
        ({"advertise": "tcp:0.0.0.0:1"}, "peers cannot connect to this"),
        ({"allow_peers": ["10.0.*"]}, "the pattern '10.0.*' must begin with"),
        ({"fabric": {"backends": []}}, "fabric.backends is []: name at least one NIXL backend"),
        ({"fabric": {"backends": ["UCX", "UCX"]}}, "each once"),
        ({"fabric": {"backend_params": {"UCX": {"num_threads": 1}}}}, "UCX.num_threads is hidden: set it to text"),
        ({"fabric": {"backend_params": {"GDS": {}}}}, "names 'GDS', but fabric.backends is UCX"),
        ({"fabric": {"backend_params": "{"}}, "not valid JSON"),
        ({"allow_peers": ["x" * 100_000]}, f"the pattern '{'x' * 80}' must begin with"),
        ({"fabric": 3}, "group of settings"),
        ({"secret": "\udcff" * 32}, "write them as text, in base64 say"),
        # settings that are each right alone
        ({"rank": 2, "world": 2}, "rank is 2 and world is 2"),
        ({"rank": 1, "trust": "none", "route": "direct"}, "rank is 1 and"),  # several are said at once
        ({"rank": 1, "trust": "none", "route": "direct"}, "trust is 'none'"),
        ({"route": "staged", "arena_bytes": 0}, "route is 'staged' and arena_bytes is 0"),
        ({"arena_bytes": "32MiB", "chunk_bytes": "32MiB"}, "is 33554432 and the receive share of the arena 16777216"),
        ({"arena_bytes": 1023, "chunk_bytes": 512}, "the send share of the arena is 0 bytes"),
        ({"trust": "none", "route": "direct"}, "trust is 'none' and route is 'direct', which needs peers that know"),
        ({"trust": "none", "arena_bytes": 0}, "trust is 'none' and arena_bytes is 0: without addresses only the"),
        ({"listen": "tcp:0.0.0.0:0"}, "set advertise"),
        ({"advertise": "tcp:10.0.0.7:0"}, "listen is 'unix'; set listen too"),
    ],
)
def test_what_is_wrong_is_said_with_field_value_and_bound_or_the_nearest_name(arguments, said):
    assert said in refusal(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVXFER_WINDOW", "0", "window is '0' (from KVXFER_WINDOW): set it to at least 1"),
        ("KVXFER_SECRET", "", "it has 0 characters"),  # refused, not ignored
    ],
)
def test_the_message_names_the_variable(environment, name, value, said):
    environment(**{name: value})
    assert said in refusal()


def test_a_nested_model_made_alone_is_checked_alike():
    assert kvxfer.Config(fabric=kvxfer.FabricConfig(num_workers=2)).fabric.num_workers == 2
    with pytest.raises(ConfigError, match=r"fabric.num_workers is 0: set it to at least 1"):
        FabricConfig(num_workers=0)
    with pytest.raises(ConfigError, match="did you mean backends"):
        FabricConfig(backend=("UCX",))


@pytest.mark.parametrize("secret", ["too-short", 12345])
def test_a_secret_never_shows(environment, secret):
    with pytest.raises(ConfigError) as caught:
        Config(secret=secret)
    shown = "".join(traceback.format_exception(caught.value))
    assert "secret is hidden" in str(caught.value)
    assert str(secret) not in shown
    config = Config(secret=SECRET)
    assert SECRET not in repr(config) + str(config) + repr(config.effective()) + config.model_dump_json()


# --- settings that are each right alone


@pytest.mark.parametrize("arguments", [
    {"rank": 1, "world": 2}, {"arena_bytes": 0}, {"listen": "tcp:0.0.0.0:0", "advertise": "tcp:10.0.0.7:0"},
    {"advertise": "tcp:10.0.0.7:9000"}, {"trust": "none"}, {"trust": "full", "route": "direct", "arena_bytes": 0},
])  # fmt: skip
def test_settings_that_do(arguments):
    Config(**arguments)


def test_an_engine_has_no_more_ranks_than_its_card_may_name():
    largest = {"rank": MAX_WORLD - 1, "world": MAX_WORLD}
    Config(**largest)
    card = {"engine": "e", "endpoint": "unix:/a", "incarnation": "00" * 32, **largest}
    assert RankCard.from_dict(card).world == MAX_WORLD
    assert f"world is {MAX_WORLD + 1}: set it to at most {MAX_WORLD}" in refusal(world=MAX_WORLD + 1)
    with pytest.raises(TicketError, match=f"<= {MAX_WORLD}"):
        RankCard.from_dict(card | {"world": MAX_WORLD + 1})


@pytest.mark.parametrize("size", ["100MiB", 100_000_001, 0, 1536, "64MiB"])
def test_shares_are_aligned_halves_of_the_arena(size):
    config = Config(arena_bytes=size)
    send, receive = config.send_bytes, config.receive_bytes
    assert send % ALIGNMENT == receive % ALIGNMENT == 0
    assert 0 <= config.arena_bytes - send - receive < ALIGNMENT
    assert 0 <= receive - send <= ALIGNMENT


@pytest.mark.parametrize(
    ("endpoint", "admitted"),
    [("unix:/a", True), ("tcp:10.0.3.4:7", True), ("tcp:10.1.3.4:7", False), ("TCP:10.0.3.4:7", False)],
)
def test_admits(endpoint, admitted):
    assert Config(allow_peers="unix:*,tcp:10.0.*:*").admits(endpoint) is admitted


# --- bounds


UNIQUE = {  # every duration another power of two, so that a sum says which of them it is made of
    "connect_timeout": 1,
    "peer_timeout": 4,
    "revoke_timeout": 8,
    "unclaimed_timeout": 16,
    "offer_lease": 32,
    "no_progress_timeout": 64,
    "drain_timeout": 128,
    "grant_lease": 512,
}


def test_bounds_follow_their_formulas():
    assert Config(**UNIQUE).bounds() == {
        "unreachable_peer": 1,
        "handshake": 1 + 6 * 1,
        "silent_peer": 4 + 8,
        "dead_peer": 8,
        "unclaimed_offer": 16,
        "released_by_lease": 4 + 64 + 8,
        "revoke": 8,
        "fetch": 8,
        "stuck_link": 64 + 8,
        "rebuild": 4 + 2 * 8,
        "drain": 128 + 8,
        "close": 128 + 8 + 5,
    }
    assert Config(**(UNIQUE | {"offer_lease": 1024})).bounds()["released_by_lease"] == 1024 + 8


def test_every_bound_is_documented_and_cannot_be_changed():
    bounds, text = Config().bounds(), Config.bounds.__doc__ or ""
    assert all(f"| `{kind}` |" in text for kind in bounds)
    assert text.count("\n        | `") == len(bounds)
    with pytest.raises(TypeError):
        bounds["close"] = 0  # type: ignore[index]


# --- what `kvxfer config` shows


def test_effective_lists_every_setting_masks_secrets_and_is_plain():
    params = {"UCX": {"num_threads": "2", "access_key": "AKIA"}}
    config = Config(secret=SECRET, fabric={"backend_params": params})
    effective = config.effective()
    assert [setting.name for setting in effective] == [name for name, _ in leaves(Config)]
    assert all(setting.description for setting in effective)
    values = {setting.name: setting.value for setting in effective}
    assert values["secret"] == "**********"
    assert values["fabric.backend_params"] == {"UCX": {"num_threads": "2", "access_key": "**********"}}
    assert SECRET not in json.dumps(values)


def test_keys_of_a_backend_are_shown_nowhere():
    keys = {"OBJ": {"secret_key": "wJalrXUtnFEMI"}}
    config = Config(fabric={"backends": ["UCX", "OBJ"], "backend_params": keys})
    assert config.fabric.backend_params == keys
    for shown in (repr(config), str(config), repr(config.fabric), str(config.effective()), config.model_dump_json()):
        assert "wJal" not in shown
        assert "secret_key" in shown


@pytest.mark.parametrize(
    "params",
    [{"UCX": {"secret_key": ["wJalrXUtnFEMI"]}}, {"UCX": "wJalrXUtnFEMI"}, '{"UCX": {"secret_key": "wJalrXUtnFEMI"'],
)
def test_no_message_has_keys_of_a_backend(params):
    fabric = {"backend_params": params}
    for made in (lambda: Config(fabric=fabric), lambda: FabricConfig(**fabric), lambda: Config(fabric=str(fabric))):
        with pytest.raises(ConfigError, match="fabric") as caught:
            made()
        assert "wJal" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", [str, str.encode, Path, lambda text: [text]])
def test_no_message_has_a_key_in_the_place_of_its_file(key):
    given = key("-----BEGIN PRIVATE KEY-----\nMIIEvQ")
    for tls in ({"key": given}, given):
        with pytest.raises(ConfigError, match="tls") as caught:
            Config(tls=tls)
        assert "MIIEvQ" not in "".join(traceback.format_exception(caught.value))


def test_every_setting_can_be_given_by_its_variable(environment):
    given = {
        "listen": "tcp:127.0.0.1:0",
        "advertise": "tcp:10.0.0.1:1",
        "secret": SECRET,
        "fabric.backends": "UCX",
        "fabric.backend_params": "{}",
        "fabric.num_workers": "1",
        "fabric.devices": "mlx5_0",
    }
    variables = {setting.name: "KVXFER_" + setting.name.upper().replace(".", "__") for setting in Config().effective()}
    for setting in Config().effective():
        value = setting.value
        text = ",".join(value) if isinstance(value, list) else str(value)
        environment(**{variables[setting.name]: given.get(setting.name, text)})
    assert Config().sources() == variables
