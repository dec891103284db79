"""What tests of several packages need."""

import socket
import threading
from contextlib import contextmanager

import pytest


@pytest.fixture
def speaking():
    """Something that says the same to whoever connects, whatever it is asked.

    `with speaking(answer) as address`: it answers as often as `times` says, and has done so at the end.
    """

    @contextmanager
    def speak(answer, times=1):
        def run():
            for _ in range(times):
                stream, _ = server.accept()
                with stream:
                    stream.recv(4096)
                    stream.sendall(answer)

        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(20)  # for whoever is not asked
            thread = threading.Thread(target=run)
            thread.start()
            try:
                yield f"127.0.0.1:{server.getsockname()[1]}"
            finally:
                thread.join()

    return speak
