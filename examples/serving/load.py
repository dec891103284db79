"""Clients that measure the service, and compare one arrangement of its servers with another.

    python -m examples.serving.load                                   # small, on a CPU
    python -m examples.serving.load --device cuda --gpus 3 --prompt 4096 --layers 16 --kv-heads 16 --head-dim 128 ...

Whatever is not an option here is one of `python -m examples.serving`. For each case it starts the servers, and

- asks for a few prompts one after the other, and compares the tokens with those that the single server says;
- sends prompts by so many clients at once, each of which waits for its answer before it asks again, and takes the time.

A case fails if a token differs there, or if any prompt was computed twice because its cache did not come. Prints a
table in Markdown; the exit code is 1 if any case has failed.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from examples.serving.api import MODEL
from examples.serving.service import Service, parser
from kvxfer.tools.versions import package, versions

CASES = {
    "single": ["--prefills", "0"],
    "whole": ["--offer-by", "whole"],
    "layers": ["--offer-by", "layers"],
    "whole, cross-layer": ["--offer-by", "whole", "--cross-layer"],
    "layers, cross-layer": ["--offer-by", "layers", "--cross-layer"],
    "layers, TP 1:2": ["--tp", "1:2"],
    "layers, TP 2:1": ["--tp", "2:1"],
}
"""What is compared, by the options of the service; all with the first."""
_PATH = "/v1/completions"
_START_SECONDS = 180.0
_HEADINGS = {
    "case": "case",
    "clients": "clients",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "inter_token_p50_ms": "between tokens p50 ms",
    "tokens_per_s": "tokens/s",
    "compute_ms": "prefill ms",
    "transfer_ms": "transfer ms",
    "hidden": "hidden",
    "after_compute_ms": "left behind prefill ms",
    "mib": "MiB",
    "route": "route",
    "same": "same answers",
}


class FailedCaseError(Exception):
    """The servers did not start, or did not say what they should."""


@dataclass
class Row:
    """One case with so many clients. Times of transfers are medians, as the prefill server saw the last 32 of them.

    Attributes:
        case: One of `CASES`.
        clients: At once.
        ttft_p50_ms: From a request to the first token of its answer.
        ttft_p99_ms: Likewise; of less than 100 requests the longest.
        inter_token_p50_ms: Between two tokens of one answer.
        tokens_per_s: Tokens of all answers, by the time from the first request to the last token.
        compute_ms: From taking a prompt to its first token, waiting for other prompts included.
        transfer_ms: From the first chunk to the last.
        hidden: Which part of that passed while the model still computed; of all transfers together.
        after_compute_ms: What was left of it then.
        mib: Of one transfer.
        route: How it went.
        same: Answers that read like those of the single server: batches round differently, so not all may.
    """

    case: str
    clients: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    tokens_per_s: float
    same: str = ""
    compute_ms: float | None = None
    transfer_ms: float | None = None
    hidden: float | None = None
    after_compute_ms: float | None = None
    mib: float | None = None
    route: str = ""


@dataclass
class _Answer:
    """What a client saw of one answer."""

    asked: float = field(default_factory=time.perf_counter)
    tokens: list[float] = field(default_factory=list)
    text: str = ""


def main() -> None:
    """Run what the command line says."""
    own = argparse.ArgumentParser(prog="python -m examples.serving.load", description="Measure the service.")
    own.add_argument("--case", action="append", choices=CASES, help="only these, and the single server")
    own.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="at once; each number is measured")
    own.add_argument("--requests", type=int, default=16, help="for each number of clients")
    own.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    own.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    own.add_argument("--checks", type=int, default=2, help="prompts whose tokens are compared first")
    own.add_argument("--json", type=Path, help="write all of it there")
    arguments, options = own.parse_known_args()
    sys.exit(asyncio.run(_measure(arguments, options)))


async def _measure(arguments: argparse.Namespace, options: list[str]) -> int:
    rows: list[Row] = []
    failed: dict[str, str] = {}
    expected: dict[str, dict[int, Any]] = {"tokens": {}, "texts": {}}
    for case, arrangement in CASES.items():
        if case != "single" and case not in (arguments.case or CASES):
            continue
        try:
            rows += await _case(case, arguments, [*options, *arrangement], expected)
        except (FailedCaseError, httpx.HTTPError) as error:
            failed[case] = f"{type(error).__name__}: {error}"
            if case == "single":  # there is nothing to compare with
                break
    print(_table(rows))
    for case, why in failed.items():
        print(f"\n{case} failed: {why}")
    if arguments.json:
        said = vars(arguments) | {"json": str(arguments.json), "options": options}
        report = {"machine": _machine(), "arguments": said, "rows": [asdict(row) for row in rows], "failed": failed}
        arguments.json.write_text(json.dumps(report, indent=1))
    return int(bool(failed))


async def _case(
    case: str, arguments: argparse.Namespace, options: list[str], expected: dict[str, dict[int, Any]]
) -> list[Row]:
    room = 1 + (max(arguments.clients) + 1) * (arguments.prompt + arguments.tokens) // 16
    chosen = parser().parse_args(["--blocks", str(room), *options, "--port", "0"])
    exact = (chosen.dtype or ("float32" if chosen.device == "cpu" else "bfloat16")) == "float32"
    async with _running(Service(chosen)) as (service, client):
        for number in range(arguments.checks):
            tokens = await _tokens(service, client, _body(arguments, number))
            if tokens != expected["tokens"].setdefault(number, tokens):
                what = f"prompt {number} has other tokens than at the single server"
                if exact:
                    raise FailedCaseError(what)
                print(f"{case}: {what}", file=sys.stderr)
        rows: list[Row] = []
        for clients in arguments.clients:
            answers, seconds = await _load(service, client, arguments, clients)
            for number, answer in answers.items():
                expected["texts"].setdefault(number, answer.text)
            same = sum(expected["texts"][number] == answer.text for number, answer in answers.items())
            row = _row(case, clients, list(answers.values()), seconds, f"{same} of {len(answers)}")
            rows.append(row)
            if "prefill 0" in service.urls:
                await _add_overlap(row, service, client, arguments.requests)
            print(_line(row), file=sys.stderr, flush=True)
        caches = (await client.get(f"{service.urls['decode 0']}/stats")).json()["caches"]
        if caches["recomputed"]:
            raise FailedCaseError(f"caches that did not come were computed again: {caches}")
        return rows


@asynccontextmanager
async def _running(service: Service) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """The servers, once all of them answer."""
    limits = httpx.Limits(max_connections=None)
    try:
        service.start()
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
            until = time.monotonic() + _START_SECONDS
            while not await service.ready(client):
                if service.ended() or time.monotonic() > until:
                    raise FailedCaseError(f"the servers did not start; ended: {service.ended()}")
                await asyncio.sleep(0.1)
            yield service, client
    finally:
        await asyncio.to_thread(service.end)


def _body(arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    """A request, the same in every case."""
    prompt = random.Random(number).choices(range(32, 127), k=arguments.prompt)
    return {"model": MODEL, "prompt": prompt, "max_tokens": arguments.tokens, "ignore_eos": True}


async def _tokens(service: Service, client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """The tokens of an answer, which only servers hear of; so this does what a router does."""
    params: dict[str, Any] = {}
    if "prefill 0" in service.urls:
        asked = body | {"kv_transfer_params": {"do_remote_decode": True}}
        params = (await _post(client, service.urls["prefill 0"], asked))["kv_transfer_params"]
    answer = await _post(client, service.urls["decode 0"], body | {"kv_transfer_params": params})
    return answer["kv_transfer_params"]["token_ids"]


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(url + _PATH, json=body)
    if response.status_code != 200:
        raise FailedCaseError(response.text)
    return response.json()


async def _load(
    service: Service, client: httpx.AsyncClient, arguments: argparse.Namespace, clients: int
) -> tuple[dict[int, _Answer], float]:
    """Answers by the numbers of their prompts, and the seconds that all of them took."""
    numbers = iter(range(arguments.requests))
    answers: dict[int, _Answer] = {}

    async def ask() -> None:
        for number in numbers:
            body = _body(arguments, number) | {"stream": True}
            answers[number] = await _stream(client, service.urls["router"], body)

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(clients)))
    return answers, time.perf_counter() - began


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> _Answer:
    answer = _Answer()
    async with client.stream("POST", url + _PATH, json=body) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return answer
            if line.startswith("data: ") and '"error"' not in line:
                answer.tokens.append(time.perf_counter())
                answer.text += json.loads(line[6:])["choices"][0]["text"]
            elif line:
                raise FailedCaseError(line)
    raise FailedCaseError("an answer ended too early")


def _row(case: str, clients: int, answers: Sequence[_Answer], seconds: float, same: str) -> Row:
    first = [answer.tokens[0] - answer.asked for answer in answers]
    gaps = [later - one for answer in answers for one, later in zip(answer.tokens, answer.tokens[1:], strict=False)]
    return Row(
        case,
        clients,
        ttft_p50_ms=statistics.median(first) * 1e3,
        ttft_p99_ms=sorted(first)[-(len(first) // 100) - 1] * 1e3,
        inter_token_p50_ms=statistics.median(gaps) * 1e3 if gaps else 0.0,
        tokens_per_s=sum(len(answer.tokens) for answer in answers) / seconds,
        same=same,
    )


async def _add_overlap(row: Row, service: Service, client: httpx.AsyncClient, requests: int) -> None:
    """What the prefill server says of the transfers of these requests."""
    url = f"{service.urls['prefill 0']}/stats"
    # an answer may end before its offer is known to have
    while (stats := (await client.get(url)).json())["tasks"]:  # noqa: ASYNC110 - HTTP alone tells
        await asyncio.sleep(0.01)
    recent = stats["recent"][-requests:]
    for name in ("compute_ms", "transfer_ms", "after_compute_ms"):
        setattr(row, name, statistics.median(each[name] for each in recent))
    beside, whole = (sum(each[name] for each in recent) for name in ("transfer_beside_compute_ms", "transfer_ms"))
    row.hidden = beside / whole if whole else 0.0
    row.mib = statistics.median(each["bytes"] for each in recent) / 2**20
    row.route = "+".join(sorted({each["route"] for each in recent}))


def _table(rows: Sequence[Row]) -> str:
    head = [" | ".join(_HEADINGS.values()), " | ".join("---" for _ in _HEADINGS)]
    return "\n".join(f"| {line} |" for line in [*head, *map(_line, rows)])


def _line(row: Row) -> str:
    said = asdict(row) | {"hidden": None if row.hidden is None else f"{row.hidden:.0%}"}
    cells = [said[name] for name in _HEADINGS]
    return " | ".join("" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)


def _machine() -> dict[str, Any]:
    cores, system = len(os.sched_getaffinity(0)), platform.platform()
    return {"cores": cores, "system": system, "transformers": package("transformers"), **versions()}


if __name__ == "__main__":
    main()
