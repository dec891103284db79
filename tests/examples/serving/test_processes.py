"""`make serve` as it stands: processes, NIXL, the official client; and a decode server that is killed in mid-answer."""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
    pytest.mark.timeout(300),  # four processes that import torch at the same time
]

ROOT = Path(__file__).parents[3]
SECONDS = 100
SMALL = ["--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--hidden", "32"]
MODEL = "tiny-llama"


class Running:
    """The service as its own output describes it."""

    def __init__(self, process):
        self.process = process
        self.urls, self.pids, self.curl = {}, {}, ""
        for line in process.stdout:
            if found := re.fullmatch(r"(\w+(?: \d)?) +(http\S+)  \(process (\d+)\)\n", line):
                self.urls[found[1]], self.pids[found[1]] = found[2], int(found[3])
            if line.startswith("curl "):
                self.curl = line.strip()
                process.stdout.readline()  # the empty line behind it
                return
        pytest.fail(f"it ended with code {process.wait(SECONDS)} and never said that it is ready")

    def client(self, name):
        return openai.OpenAI(base_url=f"{self.urls[name]}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def stats(self, name):
        return httpx.get(f"{self.urls[name]}/stats", timeout=SECONDS, trust_env=False).json()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "TMPDIR": str(tmp_path_factory.mktemp("s")), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "examples.serving", "--port", "0", "--decodes", "2", "--verify", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield Running(process)
        finally:
            process.terminate()  # it ends the others, and they end by themselves when it is gone
            try:
                process.wait(SECONDS)
            finally:
                process.kill()


def test_the_official_client_gets_what_one_server_says(service):
    router, alone = service.client("router"), service.client("decode 0")
    asked = {"model": MODEL, "prompt": "Hello there", "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    answer, expected = router.completions.create(**asked), alone.completions.create(**asked)
    assert answer.choices[0].text == expected.choices[0].text != ""
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 24)
    streamed = list(router.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in streamed[:-1]) == expected.choices[0].text
    assert len(streamed) == 25, "a token is sent when it is there"
    assert streamed[-1].usage == answer.usage


def test_the_official_client_chats(service):
    router, alone = service.client("router"), service.client("decode 0")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 12}
    expected = alone.chat.completions.create(**asked).choices[0]
    answer = router.chat.completions.create(**asked)
    assert (answer.choices[0].message, answer.choices[0].finish_reason) == (expected.message, expected.finish_reason)
    chunks = list(router.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.message.content
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_curl_line_works(service):
    done = subprocess.run(["sh", "-c", service.curl], capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode == 127:
        pytest.skip("curl is not installed")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_decode_server_that_is_killed_in_mid_answer_is_replaced(service):
    router = service.client("router")
    asked = {"model": MODEL, "prompt": "A long story", "max_tokens": 600, "extra_body": {"ignore_eos": True}}
    expected = service.client("decode 1").completions.create(**asked).choices[0].text
    stream = iter(router.completions.create(**asked, stream=True))
    text = next(stream).choices[0].text
    (victim,) = [name for name in ("decode 0", "decode 1") if service.stats(name)["running"]]
    os.kill(service.pids[victim], signal.SIGKILL)
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected
    assert service.process.stdout.readline() == f"{victim} has ended with code -9\n"
    failures = {server["url"]: server["failures"] for server in service.stats("router")["decode"]}
    assert failures.pop(service.urls[victim]) == 1
    assert list(failures.values()) == [0]
    other = router.completions.create(**asked | {"max_tokens": 8})
    assert expected.startswith(other.choices[0].text.rstrip("\ufffd"))


def test_ctrl_c_is_heard_by_the_one_that_ends_the_others_in_order(service):
    mine = os.getpgid(service.process.pid)  # to which a terminal sends it
    groups = [os.getpgid(pid) for pid in service.pids.values() if Path(f"/proc/{pid}").exists()]
    assert len(groups) >= 3
    assert mine not in groups


def test_it_ends_when_it_is_asked_to_and_leaves_nobody(service):
    caches = service.stats("prefill 0")
    assert (caches["tasks"], caches["free_blocks"]) == (0, caches["blocks"])
    service.process.terminate()
    assert service.process.wait(SECONDS) == 0
    assert [name for name, pid in service.pids.items() if Path(f"/proc/{pid}").exists()] == []
