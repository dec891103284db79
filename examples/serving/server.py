"""The HTTP server of a process. Its application knows at once that it is to stop: the lifespan ends much later."""

import logging
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette


class Server(uvicorn.Server):
    """Serves an application until it gets SIGTERM or SIGINT. Then requests under way end, and only then its lifespan.

    Args:
        application: Its `state.stopping` is set here: a callable that says whether the signal has come.
        settings: More of uvicorn's.
    """

    def __init__(self, application: Starlette, **settings: Any) -> None:
        super().__init__(
            uvicorn.Config(
                application, access_log=False, ws="none", lifespan="on", timeout_graceful_shutdown=10, **settings
            )
        )
        application.state.stopping = lambda: self.should_exit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn; but of what went wrong it says the last line alone, unless it is to say all."""
        log = logging.getLogger("uvicorn.error")
        if log.isEnabledFor(logging.DEBUG):
            return await super().startup(sockets)
        log.addFilter(_last_line)
        try:
            await super().startup(sockets)
        finally:
            log.removeFilter(_last_line)


def _last_line(record: logging.LogRecord) -> bool:
    record.msg = str(record.msg).strip().rpartition("\n")[2]
    return True
