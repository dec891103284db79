"""A transport of this process, written in Python, as the mover calls one: by C functions.

They are called from compiled code without the interpreter's lock, and take it. What is a pointer elsewhere is the
address of a number here. What a call raises is kept under a code of its own, for whoever hears of that.
"""

import ctypes
import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np

from kvxfer.errors import FabricError
from kvxfer.fabric.port import Descriptors, Handle, Native, Operation

__all__ = ["ported"]

_GONE: Final = -10
_IN_DOUBT, _REFUSED = -2000, -1_000_000
"""Codes of errors begin here and there, downwards: what may still move, and what does not."""
_KINDS: Final = ("DRAM", "VRAM")
_OPERATIONS: Final = (Operation.READ, Operation.WRITE)
_MOST_ERRORS: Final = 1000
_UNDER_WAY: Final = 1


class _Posting(Protocol):
    """What is called of a transport."""

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Handle:
        """As of `Transport`, and so are the others."""
        ...

    def poll(self, handle: Handle) -> bool: ...

    def release(self, handle: Handle) -> None: ...

    def progress(self) -> None: ...

    def notify(self, agent: str, message: bytes) -> None: ...

    def heard(self) -> list[tuple[str, bytes]]: ...


def ported(transport: _Posting) -> Native:
    """A transport as the mover calls it."""
    return _Ported(transport).native()


class _Request:
    """What is to be moved, and the handle of that once it is posted."""

    def __init__(self, operation: Operation, near: Descriptors, far: Descriptors, peer: str) -> None:
        self.moves: Final = (peer, operation, near, far)
        self.handle: Handle = None
        self.posted = self.gone = False


class _Ported:
    """The functions, and what they work on."""

    def __init__(self, transport: _Posting) -> None:
        self._transport: Final = transport
        self._numbers: Final = itertools.count(1)
        self._places: Final[dict[int, ctypes.c_int64]] = {}
        self._lists: Final[dict[int, tuple[int, list[tuple[int, int, int]]]]] = {}
        self._requests: Final[dict[int, _Request]] = {}
        self._errors: Final[dict[int, FabricError]] = {}
        self._functions: Final[list[Any]] = []
        self._agent: Final = self._place()
        self._heard: Final[dict[bytes, list[bytes]]] = {}  # since it was forgotten, by agent
        self._told: Final[list[ctypes.Array[ctypes.c_char]]] = []  # what pointers point to that were given out of it

    def native(self) -> Native:
        """All of it."""
        table = [
            self._function(2, self._create_list),
            self._function(4, self._add_piece),
            self._function(1, self._destroy_list),
            self._function(7, self._make),
            self._function(3, self._begin),
            self._function(2, self._status),
            self._function(2, self._release),
            self._function(1, self._destroy),
            self._function(3, self._notices),
            self._function(1, self._forget_notices),
            self._function(5, self._notify),
            self._function(2, self._notice_agents),
            self._function(3, self._notice_agent),
            self._function(3, self._notice_count),
            self._function(5, self._notice),
            self._function(2, self._cause),
        ]
        return Native(np.array(table, np.int64), self._agent, 0, self._error)

    def _function(self, count: int, function: Callable[..., int]) -> int:
        made = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)(partial(self._call, function))
        self._functions.append(made)
        return ctypes.cast(made, ctypes.c_void_p).value or 0

    def _place(self) -> int:
        """What stands for a pointer: the address of a number of its own."""
        word = ctypes.c_int64(next(self._numbers))
        self._places[ctypes.addressof(word)] = word
        return ctypes.addressof(word)

    def _call(self, function: Callable[..., int], *arguments: int) -> int:
        try:
            return function(*arguments)
        except FabricError as error:
            return self._kept(error, _IN_DOUBT)
        except BaseException as error:  # noqa: BLE001 - nobody is above a C function
            told: Any = SimpleNamespace(
                exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=function
            )
            sys.unraisablehook(told)
            return self._kept(FabricError(f"a defect of the transport: {error!r}"), _IN_DOUBT)

    def _kept(self, error: FabricError, base: int) -> int:
        code = base - next(self._numbers)
        self._errors[code] = error
        if len(self._errors) > _MOST_ERRORS:
            del self._errors[next(iter(self._errors))]
        return code

    def _error(self, code: int, doing: str, gone: bool, in_doubt: bool) -> FabricError:
        kept = self._errors.pop(code, None)
        text = f"could not {doing}: code {code}" if kept is None else str(kept)
        error = FabricError(text, disconnected=gone, in_doubt=in_doubt)
        error.__cause__ = None if kept is None else kept.__cause__
        return error

    # --- the functions

    def _create_list(self, kind: int, out: int) -> int:
        made = self._place()
        self._lists[made] = kind, []
        ctypes.c_int64.from_address(out).value = made
        return 0

    def _add_piece(self, made: int, address: int, nbytes: int, device: int) -> int:
        self._lists[made][1].append((address, nbytes, device))
        return 0

    def _destroy_list(self, made: int) -> int:
        del self._lists[made], self._places[made]
        return 0

    def _make(self, agent: int, operation: int, near: int, far: int, peer: int, out: int, options: int) -> int:
        del agent, options
        here, there = (
            Descriptors(_KINDS[kind], pieces[0][2], np.array(pieces, np.int64)[:, :2])
            for kind, pieces in (self._lists[near], self._lists[far])
        )
        made = self._place()
        self._requests[made] = _Request(_OPERATIONS[operation], here, there, ctypes.string_at(peer).decode())
        ctypes.c_int64.from_address(out).value = made
        return 0

    def _begin(self, agent: int, made: int, options: int) -> int:
        del agent, options
        request = self._requests[made]
        try:
            request.handle = self._transport.post(*request.moves)
        except FabricError as error:
            request.gone = error.disconnected
            return self._kept(error, _IN_DOUBT if error.in_doubt else _REFUSED)
        request.posted = True
        return _UNDER_WAY

    def _status(self, agent: int, made: int) -> int:
        del agent
        request = self._requests[made]
        try:
            return 0 if self._transport.poll(request.handle) else _UNDER_WAY
        except FabricError as error:
            request.gone = error.disconnected
            raise

    def _release(self, agent: int, made: int) -> int:
        del agent
        if self._requests[made].posted:
            self._transport.release(self._requests[made].handle)
        return 0

    def _destroy(self, made: int) -> int:
        del self._requests[made], self._places[made]
        return 0

    def _notices(self, agent: int, notices: int, options: int) -> int:
        del agent, notices, options
        self._transport.progress()
        for name, message in self._transport.heard():
            self._heard.setdefault(name.encode(), []).append(message)
        return 0

    def _forget_notices(self, notices: int) -> int:
        del notices
        self._heard.clear()
        self._told.clear()
        return 0

    def _notify(self, agent: int, peer: int, message: int, nbytes: int, options: int) -> int:
        del agent, options
        self._transport.notify(ctypes.string_at(peer).decode(), ctypes.string_at(message, nbytes))
        return 0

    def _notice_agents(self, notices: int, out: int) -> int:
        del notices
        return self._out(out, len(self._heard))

    def _notice_agent(self, notices: int, number: int, out: int) -> int:
        del notices
        return self._out(out, self._pointer(list(self._heard)[number]))

    def _notice_count(self, notices: int, agent: int, out: int) -> int:
        del notices
        return self._out(out, len(self._heard[ctypes.string_at(agent)]))

    def _notice(self, notices: int, agent: int, number: int, out: int, nbytes: int) -> int:
        del notices
        message = self._heard[ctypes.string_at(agent)][number]
        self._out(nbytes, len(message))
        return self._out(out, self._pointer(message))

    @staticmethod
    def _out(at: int, number: int) -> int:
        ctypes.c_int64.from_address(at).value = number
        return 0

    def _pointer(self, text: bytes) -> int:
        self._told.append(ctypes.create_string_buffer(text))
        return ctypes.addressof(self._told[-1])

    def _cause(self, agent: int, number: int) -> int:
        del agent
        found = next((one for at, one in self._requests.items() if self._places[at].value == number), None)
        return _GONE if found is not None and found.gone else 0
