"""Endpoints are read strictly and written back as they were."""

import pytest

from kvxfer.endpoint import Endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("unix", Endpoint("unix")),
        ("unix:/run/a.sock", Endpoint("unix", path="/run/a.sock")),
        ("tcp:10.0.0.7:9000", Endpoint("tcp", host="10.0.0.7", port=9000)),
        ("tcp:host.example:0", Endpoint("tcp", host="host.example", port=0)),
        ("tcp:[::1]:65535", Endpoint("tcp", host="::1", port=65535)),
    ],
)
def test_round_trip(text, endpoint):
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:relative",
        "unix:/" + "x" * 107,
        "unix:/" + "é" * 54,
        "tcp:",
        "tcp:host",
        "tcp::9000",
        "tcp:host:",
        "tcp:host:x",
        "tcp:host:-1",
        "tcp:host:65536",
        "tcp:host:²",
        "tcp:host:000080",
        "tcp:ho st:80",
        "tcp:host\n:80",
        "tcp:\ud800:80",
        "unix:/a\n",
        "unix:/a\0b",
        "tcp:::1:9000",
        "tcp:[]:9000",
        "udp:host:1",
        "host:1",
        "UNIX",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"unix|endpoint"):
        Endpoint.parse(text)


def test_the_longest_socket_path_is_taken():
    assert Endpoint.parse("unix:/" + "x" * 106).path == "/" + "x" * 106


@pytest.mark.parametrize(
    ("text", "anywhere"), [("tcp:0.0.0.0:0", True), ("tcp:[::]:1", True), ("tcp:127.0.0.1:0", False), ("unix", False)]
)
def test_anywhere(text, anywhere):
    assert Endpoint.parse(text).anywhere is anywhere


@pytest.mark.parametrize(
    ("text", "reachable"), [("unix", False), ("unix:/a", True), ("tcp:host:0", False), ("tcp:host:1", True)]
)
def test_reachable(text, reachable):
    assert Endpoint.parse(text).reachable is reachable
