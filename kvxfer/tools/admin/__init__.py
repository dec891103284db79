"""What an operator sees of workers: metrics, health, their state as JSON, and a page that shows it live.

    async with kvxfer.Worker(tensors) as worker, kvxfer.tools.admin.serve(worker, address="127.0.0.1:9471"):
        ...

`serve` answers from a thread of its own, so it can say that the worker's loop stands still. `app` is the same as an
ASGI application, to be mounted into one's own; `Collector` gives the metrics to a registry of one's own. All of them
take workers of any kind, and need the extra `admin`. What is served is in SECURITY.md.
"""

from importlib.util import find_spec

from kvxfer.errors import MissingExtraError

for _package in ("prometheus_client", "starlette", "uvicorn"):
    if find_spec(_package) is None:
        raise MissingExtraError(f"kvxfer.tools.admin needs {_package}, which is not installed: pip install {_package}")

from kvxfer.tools.admin.app import app  # noqa: E402 - after it was seen that they can be imported
from kvxfer.tools.admin.look import Limits  # noqa: E402
from kvxfer.tools.admin.prometheus import Collector  # noqa: E402
from kvxfer.tools.admin.server import AdminServer, serve  # noqa: E402

__all__ = ["AdminServer", "Collector", "Limits", "app", "serve"]
