"""Control streams whose bytes come late, not for a while, or not any more. The order of bytes is never changed."""

from collections import deque

import inside

from kvxfer.peers.link import Link


class Streams:
    """Between every stream of this process and its `Link`: what comes in waits here."""

    def __init__(self, loop):
        self.delay = lambda: 0.0  # draws the seconds that the next bytes take
        self._loop = loop
        self._deaf = set()  # workers that hear nothing
        self._dead = set()  # workers that are no more
        self._waiting: dict[Link, deque] = {}
        self._scheduled: set[Link] = set()

    def install(self, monkeypatch):
        received, lost = Link.data_received, Link.connection_lost

        def receive(link, data):
            if link.failure is None:  # else this side has closed it, and reads no more
                received(link, data)

        monkeypatch.setattr(Link, "data_received", lambda link, data: self._came(link, lambda: receive(link, data)))
        monkeypatch.setattr(Link, "connection_lost", lambda link, error: self._came(link, lambda: lost(link, error)))

    def silence(self, worker):
        """Let nothing that comes reach this worker, for now."""
        self._deaf.add(inside.service(worker))

    def heal(self):
        """What was kept back comes now."""
        self._deaf.clear()
        for link in list(self._waiting):
            self._schedule(link)

    def kill(self, worker):
        """The streams of a process that was killed: the other ends hear that they are closed, it hears nothing."""
        self._dead.add(inside.service(worker))
        for link in inside.streams(worker):
            inside.cut_session(link)

    def _came(self, link, handle):
        self._waiting.setdefault(link, deque()).append(handle)
        self._schedule(link)

    def _schedule(self, link):
        if link not in self._scheduled and link._handler not in self._deaf:
            self._scheduled.add(link)
            self._loop.call_later(self.delay(), self._deliver, link)

    def _deliver(self, link):
        self._scheduled.discard(link)
        if link._handler in self._dead or link._handler in self._deaf:
            return
        waiting = self._waiting.pop(link, ())
        for handle in waiting:
            handle()
