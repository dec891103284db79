"""Functions compiled to machine code: they hold no interpreter lock, and are compiled once on a machine.

They see numbers alone. An address is an int64, and so is the address of a C function: nothing of a process is part of
the code, so it can be kept on disk and loaded by the next one.

The folder it is kept in is named by everything that it was made of, because numba itself looks only at the file of a
function, and at none of the files of those that it calls; and it belongs to this user alone, because what numba keeps
there is unpickled.

numba's own types say little, so this module is checked less strictly than the rest.
"""

# pyright: basic

import hashlib
import os
import stat
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from kvxfer.errors import MissingExtraError
from kvxfer.telemetry import logger

try:
    import llvmlite
    import numba
    from llvmlite import ir
    from numba.core import cgutils
    from numba.extending import intrinsic
except ImportError as error:
    raise MissingExtraError(f"kvxfer compiles its copies with numba, which cannot be imported: {error}") from error

__all__ = [
    "add",
    "bits_of",
    "cache_folder",
    "call",
    "call_long",
    "call_variadic",
    "clear_bytes",
    "compiled",
    "copy_bytes",
    "copy_word",
    "exchange",
    "float_of",
    "inlined",
    "load",
    "load_word",
    "prefetch",
    "store",
    "store_word",
]

_log: Final = logger("kvxfer.compiler")
_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS: Final[dict[str, Any]] = {"error_model": "numpy"}
_UNWRAPPED: Final[dict[str, Any]] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_SLOW_S: Final = 0.5
_HERE: Final = Path(__file__).parent
_I64: Final = ir.IntType(64)
_config: Final[Any] = numba.config  # pyright: ignore[reportPrivateImportUsage]


def compiled(signature: str, *, nogil: bool = True) -> Callable[[_F], _F]:
    """Compile a function for these types as it is defined, or load what was compiled before.

    With `nogil` others may use the interpreter meanwhile, and who calls it waits for them when it returns.

    Raises:
        MissingExtraError: If numba is told to compile nothing.
    """
    if _config.DISABLE_JIT:
        raise MissingExtraError("kvxfer copies by compiled code, but NUMBA_DISABLE_JIT is set: unset it")

    def make(function: _F) -> _F:
        began, folder = time.monotonic(), cache_folder(Path(function.__code__.co_filename).parent)
        try:
            made = _made(function, signature, folder, nogil=nogil)
        except Exception as error:  # what is kept is unpickled, so whatever is wrong with it may come out
            if folder is None:
                raise
            _not_kept(folder, f"{type(error).__name__}: {error}; remove the folder if it is damaged")
            made = _made(function, signature, None, nogil=nogil)
        took = time.monotonic() - began
        if took > _SLOW_S:
            _log.info("function_compiled", name=function.__name__, duration=took, path=str(folder or ""))
        return made

    return make


def _made(function: _F, signature: str, folder: Path | None, *, nogil: bool) -> _F:
    elsewhere = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder or elsewhere)  # read as a function is defined, and at no other time
    try:
        return cast("_F", numba.njit(signature, cache=folder is not None, nogil=nogil, **_OPTIONS)(function))
    finally:
        _config.CACHE_DIR = elsewhere


def inlined(function: _F) -> _F:
    """A function that compiled ones call: compiled with each of them, once, whatever numbers stand written in a call.

    For each of those numba would compile another one, and all that it calls along with it. It also has nothing by which
    Python or C could call it.
    """
    made: Any = numba.njit(**_UNWRAPPED, **_OPTIONS)(function)
    typed = made.get_call_template
    made.get_call_template = lambda given, named: typed(tuple(map(numba.types.unliteral, given)), named)
    return cast("_F", made)


@cache
def cache_folder(package: Path = _HERE) -> Path | None:
    """Where machine code is kept of functions of a package; None if there is no such place."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {_config.BOUNDSCHECK}".encode())
    for source in sorted({*_HERE.glob("*.py"), *package.glob("*.py")}):
        digest.update(source.read_bytes())
    folder = Path(digest.hexdigest()[:16])
    try:
        folder = Path(_config.CACHE_DIR or Path(_cache_home(), "kvxfer"), folder)
        if not folder.exists():
            _log.info(
                "compilation_began", path=str(folder), reason="once on a machine and version; it may take a minute"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owned(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except (OSError, RuntimeError) as error:  # the second: of a user without a home
        _not_kept(folder, f"{error}; set NUMBA_CACHE_DIR to a folder of this user")
        return None
    return folder


def _check_owned(folder: Path) -> None:
    """Refuse a folder in which somebody else could put a file, or in whose place another folder."""
    if folder.is_symlink():
        raise PermissionError("it is a symbolic link")
    resolved = folder.resolve()
    for each in (resolved, *resolved.parents):
        found = each.stat()
        writers = 0o022 if each == resolved else 0 if found.st_mode & stat.S_ISVTX else 0o002
        if found.st_uid not in {os.geteuid(), 0} or found.st_mode & writers:
            raise PermissionError(f"others than this user may write to {each}")


def _not_kept(folder: Path, reason: str) -> None:
    _log.warning("compiled_code_not_kept", path=str(folder), reason=reason)


def _cache_home() -> str:
    return os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())


# --- what compiled functions can do and Python cannot


def _instruction(result: Any, given: Any = numba.int64) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make of a function that writes code one for compiled callers: of numbers of a type, with a result of another.

    A `width`, which comes last, is a number that is written where this is called.
    """

    def of(write: Callable[..., Any]) -> Callable[..., Any]:
        def typed(typing: Any, *arguments: Any) -> Any:
            kinds, known = [given] * len(arguments), list[int]()
            if "width" in write.__code__.co_varnames:
                if not isinstance(arguments[-1], numba.types.IntegerLiteral):
                    return None
                kinds[-1], known = arguments[-1], [arguments[-1].literal_value]

            def code(context: Any, builder: Any, signature: Any, packed: Any) -> Any:
                numbers = cgutils.unpack_tuple(builder, packed[0], len(arguments))
                made = write(builder, *numbers[: len(numbers) - len(known)], *known)
                return context.get_dummy_value() if result is numba.void else made

            together: Any = numba.types.StarArgTuple.from_types(kinds)
            return result(together), code

        typed.__name__ = write.__name__  # as numba's errors call it
        return cast("Callable[..., Any]", intrinsic(prefer_literal=True)(typed))

    return of


_ANYWHERE: Final = "null_pointer_is_valid"
"""An attribute of functions, which llvmlite does not know. LLVM may make of a number that is an address a step from
null; nobody may read there, so that it leaves out what depends on what is read, unless it is told this."""


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    set.add(builder.function.attributes, _ANYWHERE)
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@_instruction(numba.int64)
def load(builder: Any, address: Any) -> Any:
    """The int64 at an address that is a multiple of 8."""
    return builder.load(_pointer(builder, address, 64))


@_instruction(numba.void)
def store(builder: Any, address: Any, number: Any) -> None:
    """Put an int64 at an address that is a multiple of 8."""
    builder.store(number, _pointer(builder, address, 64))


@_instruction(numba.int64)
def load_word(builder: Any, address: Any, width: int) -> Any:
    """The number of 1, 2 or 4 bytes, without a sign, at any address."""
    word = builder.load(_pointer(builder, address, 8 * width))
    word.align = 1
    return builder.zext(word, _I64)


@_instruction(numba.void)
def store_word(builder: Any, address: Any, number: Any, width: int) -> None:
    """Put the lowest 1, 2 or 4 bytes of a number at any address."""
    builder.store(builder.trunc(number, ir.IntType(8 * width)), _pointer(builder, address, 8 * width)).align = 1


@_instruction(numba.float32)
def float_of(builder: Any, bits: Any) -> Any:
    """The float32 whose bits are the lower half of a number."""
    return builder.bitcast(builder.trunc(bits, ir.IntType(32)), ir.FloatType())


@_instruction(numba.int64, numba.float32)
def bits_of(builder: Any, value: Any) -> Any:
    """The bits of a float32, as a number without a sign."""
    return builder.zext(builder.bitcast(value, ir.IntType(32)), _I64)


@_instruction(numba.void)
def prefetch(builder: Any, address: Any) -> None:
    """Have the cache line at an address brought near. Whatever lies there, nothing comes of it."""
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.inttoptr(address, pointer), number(0), number(3), number(1)])  # data, to read


@_instruction(numba.void)
def copy_bytes(builder: Any, dst: Any, src: Any, nbytes: Any) -> None:
    """Copy so many bytes, to where none of them is read."""
    cgutils.raw_memcpy(builder, _pointer(builder, dst, 8), _pointer(builder, src, 8), nbytes, 1)


@_instruction(numba.void)
def clear_bytes(builder: Any, address: Any, nbytes: Any) -> None:
    """Put zeros into so many bytes."""
    cgutils.memset(builder, _pointer(builder, address, 8), nbytes, 0)


@_instruction(numba.void)
def copy_word(builder: Any, dst: Any, src: Any, width: int) -> None:
    """Copy one word of 1, 2, 4, 8 or 16 bytes."""
    word = builder.load(_pointer(builder, src, 8 * width))
    word.align = 1
    builder.store(word, _pointer(builder, dst, 8 * width)).align = 1


@_instruction(numba.int64)
def add(builder: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, for all threads at once; returns what it was before."""
    return builder.atomic_rmw("add", _pointer(builder, address, 64), number, "seq_cst")


@_instruction(numba.boolean)
def exchange(builder: Any, address: Any, expected: Any, number: Any) -> Any:
    """Put a number at an address if what is there is as expected, for all threads at once; whether it was."""
    pair = builder.cmpxchg(_pointer(builder, address, 64), expected, number, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 1)


def _call(result: Any, *, variadic: bool = False) -> Callable[..., Any]:
    """What calls a C function of numbers and pointers; each is passed as 64 bits, of which it takes what it needs."""

    @_instruction(numba.int64)
    def call(builder: Any, function: Any, *numbers: Any) -> Any:
        kind = ir.FunctionType(result, [_I64] * len(numbers), var_arg=variadic)
        found = builder.call(builder.inttoptr(function, kind.as_pointer()), numbers)
        return found if result.width == _I64.width else builder.sext(found, _I64)

    return call


call: Final = _call(ir.IntType(32))
"""`call(address, *arguments)`: the C function at an address, which returns an int."""
call_long: Final = _call(_I64)
"""The same for one that returns a long."""
call_variadic: Final = _call(ir.IntType(32), variadic=True)
"""The same for one with a variable number of arguments that returns an int, as `fcntl`."""
