"""Memory of one process that another one on the same host can address.

    host      this host and its processes, windows onto their memory, open files; CPU memory     (host.py)
    gpu       GPU memory: CUDA IPC handles, fabric handles, or open files                        (gpu.py)

Importing this package imports neither torch nor CUDA.
"""

from kvxfer.mapped.host import (
    Export,
    Window,
    Windows,
    check_process,
    elsewhere,
    export,
    here,
    joined,
    may_be_elsewhere,
    number_of,
    open_window,
    own_number,
    process_of_stream,
    unlike,
)

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
