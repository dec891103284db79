"""Endpoints are read strictly and written back as they were."""

import pytest

from kvxfer.names import Endpoint, is_admitted


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


@pytest.mark.parametrize("text", [
    "", "unix:", "unix:relative", "unix:/" + "x" * 107, "unix:/" + "é" * 54, "tcp:", "tcp:host", "tcp::9000",
    "tcp:host:", "tcp:host:x", "tcp:host:-1", "tcp:host:65536", "tcp:host:²", "tcp:host:000080", "tcp:ho st:80",
    "tcp:host\n:80", "tcp:\ud800:80", "unix:/a\n", "unix:/a\0b", "tcp:::1:9000", "tcp:[]:9000", "udp:host:1", "host:1",
    "UNIX", "tcp:[fd00::7.example]:1",
])  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"unix|endpoint"):
        Endpoint.parse(text)


def test_the_longest_socket_path_is_taken():
    assert Endpoint.parse("unix:/" + "x" * 106).path == "/" + "x" * 106


@pytest.mark.parametrize(("text", "anywhere", "reachable"), [
    ("tcp:0.0.0.0:0", True, False), ("tcp:[::]:1", True, True), ("tcp:[0::0]:1", True, True), ("tcp:0:1", True, True),
    ("tcp:0x0.0:1", True, True), ("tcp:127.0.0.1:0", False, False), ("tcp:host:0", False, False),
    ("tcp:host:1", False, True), ("unix", False, False), ("unix:/a", False, True),
])  # fmt: skip
def test_anywhere_and_reachable(text, anywhere, reachable):
    endpoint = Endpoint.parse(text)
    assert (endpoint.anywhere, endpoint.reachable) == (anywhere, reachable)


@pytest.mark.parametrize(
    ("pattern", "admitted", "refused"),
    [
        ("unix:*", ["unix:/a/b"], ["tcp:h:1", "unix:/a/../b", "nonsense"]),
        ("tcp:*", ["tcp:h:1", "tcp:[::1]:1"], ["unix:/a", "tcp:h", "TCP:h:1"]),
        ("tcp:10.0.*:*", ["tcp:10.0.3.4:7"], ["tcp:10.1.3.4:7", "tcp:10.0.example.org:7", "tcp:10.0.1:7"]),
        ("tcp:10.0.3.[45]:7", ["tcp:10.0.3.4:7", "tcp:10.0.3.5:07"], ["tcp:10.0.3.6:7", "tcp:10.0.3.4:70"]),
        ("tcp:10.0.3.4", ["tcp:10.0.3.4:7"], ["tcp:10.0.3.45:7"]),
        ("tcp:[fd00::7]:*", ["tcp:[fd00::7]:7"], ["tcp:[fd00::8]:7", "tcp:f:7"]),
        ("tcp:[fd00::*]:70*", ["tcp:[fd00::7]:7001"], ["tcp:[fd01::7]:7001", "tcp:[fd00::7]:7"]),
        ("tcp:[fd00::*]", ["tcp:[fd00::7%eth0]:7"], ["tcp:[fd00::7.example.org]:7"]),
        ("tcp:[fd00::7]", ["tcp:[fd00::7]:7"], ["tcp:[fd00::8]:7"]),
        ("tcp:*.pod.example:*", ["tcp:p0.pod.example:7"], ["tcp:pod.example:7", "tcp:p0.pod.example.org:7"]),
        ("unix:/run/kvxfer/*", ["unix:/run/kvxfer/0.sock"], ["unix:/run/kvxfer/../../tmp/0.sock", "unix:/tmp/0.sock"]),
        ("unix:/run/../a.sock", ["unix:/run/../a.sock"], ["unix:/a.sock"]),
    ],
)
def test_a_pattern_admits_what_it_stands_for_and_nothing_that_looks_alike(pattern, admitted, refused):
    assert [text for text in [*admitted, *refused] if is_admitted(text, pattern)] == admitted
