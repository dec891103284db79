"""The page in a real browser: it draws what `/status.json` says, and text of peers stays text."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from inside import take
from stage import Cache, eventually

import kvxfer.tools.admin

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
PAGE = (Path(kvxfer.tools.admin.__file__).parent / "page.html").read_text()
NAME = "<b>decode</b><img src=x onerror=document.body.dataset.harmed=1>"


def test_the_page_needs_nothing_from_elsewhere():
    assert re.findall(r"https?://[^\"' )]+", PAGE) == ["http://www.w3.org/2000/svg"]  # a name, which nobody loads
    assert not re.search(r"<link|<img|<iframe|@import|url\(|\bsrc=|\bimport\(", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", PAGE)


STOPPED = """
const news = { textContent: "live" }, soon = AbortSignal.timeout.bind(AbortSignal, 1);
AbortSignal.timeout = soon;
globalThis.document = { body: { dataset: {} }, getElementById: () => news };
globalThis.fetch = (_, { signal }) => new Promise((_, no) => signal?.addEventListener("abort", no));
setTimeout(() => { console.log(news.textContent); process.exit(); }, 500);
"""


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
def test_a_process_that_is_stopped_is_not_said_to_be_live():
    code = STOPPED + re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)[1]  # type: ignore[index]
    done = subprocess.run([str(NODE), "-"], input=code, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no answer: ")


async def browse(url, folder):
    """What the page has become after some seconds of its own time, and what it complained of."""
    browser = await asyncio.create_subprocess_exec(
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-proxy-server",
        "--enable-logging=stderr",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=6000",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(browser.communicate(), 60)
    finally:
        if browser.returncode is None:
            browser.kill()
            await browser.wait()
    return out.decode(), [line for line in err.decode().splitlines() if "CONSOLE" in line]


async def load(prefill, decode, over):
    """Fetch, one after the other, until it is over."""
    number = 0
    while not over.is_set():
        number += 1
        prefill.offer(f"r{number}", [1, 2], tokens=8)
        await decode.fetch(prefill.engine.ticket(f"r{number}"), [3, 4], tokens=range(8), timeout=30)
        await asyncio.sleep(0.01)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_a_browser_draws_it(stage, tmp_path):
    prefill = await stage.worker("prefill", Cache(), route="staged")
    decode = await stage.worker("decode", Cache(), route="staged", engine=NAME)
    tired = await stage.worker("tired", Cache())
    tired.begin_drain()
    held = take(tired, "receive", 4096, "somebody")
    held.quarantine("somebody is silent")
    waiting = decode.start_fetch(prefill.engine.ticket("waits"), [5], tokens=range(4), timeout=110)
    await eventually(lambda: prefill.describe()["transfers"])
    over = asyncio.Event()
    loading = asyncio.create_task(load(prefill, decode, over))
    async with kvxfer.tools.admin.serve([prefill, decode, tired], address="127.0.0.1:0") as server:
        page, complaints = await browse(server.url, tmp_path)
    over.set()
    await loading
    held.settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert complaints == []
    assert int(re.search(r'data-polls="(\d+)"', page)[1]) > 2  # type: ignore[index]
    first, second, third = page.split('<article class="worker">')[1:]
    assert ">ready<" in first
    assert ">not ready<" in third
    assert "it is draining" in third
    for drawn in (first, second):  # throughput is a line of more than one point, and one latency at least
        assert len([path for path in re.findall(r'<path d="([^"]*)"', drawn) if path.count("L") > 1]) >= 2
        assert "waits</code>" in drawn
        assert "LoopbackTransport · world 1</span>" in drawn
        assert re.search(r'class="axis dim"><span>[\d.]+ MiB/s</span><span>[\d.]+ MiB/s</span><span>0</span>', drawn)
    assert re.search(
        r'<span class="quarantined" title="quarantined: 0.00391 MiB at 0, somebody: somebody is silent"', third
    )
    # what a peer calls itself is text
    assert "&lt;b&gt;decode&lt;/b&gt;&lt;img src=x" in first
    assert "<img" not in page
    assert "data-harmed" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_a_browser_says_that_a_worker_does_not_answer(tmp_path):
    closed = kvxfer.BlockingWorker(kvxfer.Config(engine="asleep"))
    async with kvxfer.tools.admin.serve(closed, address="127.0.0.1:0") as server:
        page, complaints = await browse(server.url, tmp_path)
    assert complaints == []
    assert "asleep[0]" in page
    assert ">not ready<" in page
    assert "this worker has no tensors: call register() first" in page
