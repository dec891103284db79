"""Counts what goes over a control stream: a socket in front of a worker's own that passes everything on."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = ["Relay"]

_READ_BYTES: Final = 1 << 16


class Relay:
    """Listens at one Unix socket and connects to another one."""

    def __init__(self) -> None:
        self.sent = 0
        self.answered = 0

    @asynccontextmanager
    async def serving(self, listen: Path, target: Path) -> AsyncGenerator[None, None]:
        """Pass on inside; streams that are still open are cut at the end."""
        streams: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                streams.add(task)
            there, back = await asyncio.open_unix_connection(target)
            with suppress(ConnectionError):
                await asyncio.gather(self._pass(reader, back, up=True), self._pass(there, writer, up=False))

        server = await asyncio.start_unix_server(serve, listen)
        try:
            yield
        finally:
            server.close()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        try:
            while data := await reader.read(_READ_BYTES):
                if up:
                    self.sent += len(data)
                else:
                    self.answered += len(data)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
