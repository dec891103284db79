"""Memory of one process that another one on the same host can address.

    window    what an owner says of its memory, and what a peer makes of it; open files      (window.py)
    cpu       this host and its processes; CPU memory: anonymous files that both map         (cpu.py)
    gpu       GPU memory: CUDA IPC handles, fabric handles, or open files                    (gpu.py)

Importing this package imports neither torch nor CUDA.
"""

from kvxfer.mapped.cpu import (
    check_process,
    elsewhere,
    here,
    may_be_elsewhere,
    number_of,
    own_number,
    process_of_stream,
    unlike,
)
from kvxfer.mapped.window import Export, Window, Windows, export, joined, open_window

__all__ = [
    "Export",
    "Window",
    "Windows",
    "check_process",
    "elsewhere",
    "export",
    "here",
    "joined",
    "may_be_elsewhere",
    "number_of",
    "open_window",
    "own_number",
    "process_of_stream",
    "unlike",
]
