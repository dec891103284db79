"""The ASGI application: what an operator asks of workers over HTTP. Everything is read, nothing can be changed."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvxfer.tools.admin.look import PATIENCE_SECONDS, Limits, Watched, given_workers, look
from kvxfer.tools.admin.prometheus import Collector
from kvxfer.tools.admin.status import status

__all__ = ["app"]

_Endpoint: TypeAlias = Callable[[Request], Response | Awaitable[Response]]
_HERE: Final = Path(__file__).parent
_MARGIN_SECONDS: Final = 8.0
"""How long after its workers' patience the page still waits for what was asked."""
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def app(
    workers: Watched | Iterable[Watched],
    *,
    limits: Limits | None = None,
    patience: float = PATIENCE_SECONDS,
) -> Starlette:
    """An ASGI application with `/` (a page), `/metrics`, `/healthz`, `/readyz`, `/status.json` and `/grafana.json`.

    Mount it into an application of your own: `Mount("/kvxfer", kvxfer.tools.admin.app(worker))`. It runs on that loop,
    so it cannot answer while the loop stands still; `serve` can.

    Args:
        workers: One or several. They may be closed before the application is.
        limits: From when on a worker counts as not ready.
        patience: Seconds that a worker's loop may take to answer.
    """
    watched, bounds = given_workers(workers, patience), limits or Limits()
    served = CollectorRegistry()
    served.register(Collector(watched, limits=bounds, patience=patience))

    # plain functions: they wait for workers, so they run in threads, of which there are as many as starlette has

    def metrics(_: Request) -> Response:
        return Response(generate_latest(served), media_type=CONTENT_TYPE_LATEST, headers=_HEADERS)

    def readyz(_: Request) -> Response:
        found = {f"{one.engine}[{one.rank}]": one.reasons(bounds) for one in look(watched, patience)}
        ready = not any(found.values())
        return JSONResponse({"ready": ready, "reasons": found}, 200 if ready else 503, headers=_HEADERS)

    def everything(_: Request) -> Response:
        return JSONResponse(status(look(watched, patience), bounds), headers=_HEADERS)

    page, dashboard = ((_HERE / name).read_text() for name in ("page.html", "grafana.json"))
    page = page.replace('data-seconds="10"', f'data-seconds="{patience + _MARGIN_SECONDS:g}"')
    paths: dict[str, _Endpoint] = {
        "/": _always(page, "text/html", {"Content-Security-Policy": _POLICY}),
        "/healthz": _always("ok\n", "text/plain"),
        "/grafana.json": _always(dashboard, "application/json"),
        "/metrics": metrics,
        "/readyz": readyz,
        "/status.json": everything,
    }
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in paths.items()])


def _always(text: str, kind: str, headers: Mapping[str, str] = MappingProxyType({})) -> _Endpoint:
    """What answers so. A coroutine: it waits for nobody, so it answers though all threads wait for workers."""

    async def answer(_: Request) -> Response:
        # one for each: what an application puts around this one may change it, as what compresses it does
        return Response(text, media_type=kind, headers={**_HEADERS, **headers})

    return answer
