"""Lists of the pieces of a post. They are made by compiled code: NIXL is called for each piece.

A module of its own since it needs numba, which takes a second to import.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy.compiler import call, compiled, load, room
from kvxfer.fabric.capi import KINDS, TABLE, CallError, Capi, Owned

__all__ = ["list_pieces", "listed"]

_CREATE, _RESERVE, _CLEAR, _ADD, _DESTROY = (
    TABLE.index(name)
    for name in (
        "create_xfer_dlist",
        "xfer_dlist_resize",
        "xfer_dlist_clear",
        "xfer_dlist_add_desc",
        "destroy_xfer_dlist",
    )
)
_MANY: Final = 16
"""From here on room for all is made at once; it stays when the list is emptied."""


@compiled("int64(int64[::1], int64, Array(int64, 2, 'C', readonly=True), int64)")
def list_pieces(table: Any, kind: int, pieces: Any, device: int) -> int:
    """Create a list of pieces of one side.

    Args:
        table: Addresses of functions, in the order of `capi.TABLE`.
        kind: Of memory, as NIXL has it.
        pieces: Address and bytes of each.
        device: Of all of them.

    Returns:
        The list; if there is none, what the function that failed returned, which is less than 0.
    """
    out = room()
    status: int = call(table[_CREATE], kind, out)
    if status != 0:
        return status
    made: int = load(out)
    count = len(pieces)
    if count >= _MANY:
        status = call(table[_RESERVE], made, count) | call(table[_CLEAR], made)
    for row in range(count):
        status |= call(table[_ADD], made, pieces[row, 0], pieces[row, 1], device)
    if status != 0:
        call(table[_DESTROY], made)
        return status
    return made


def listed(library: Capi, kind: str, pieces: NDArray[np.int64], device: int) -> Owned:
    """NIXL's list of pieces of one side: address and bytes of each.

    Raises:
        CallError: It cannot be made.
    """
    made = list_pieces(library.table, KINDS[kind], np.ascontiguousarray(pieces, np.int64), device)
    if made < 0:
        raise CallError("nixl_capi_xfer_dlist_add_desc", made)
    return Owned(made, library.destroy_xfer_dlist)
