"""Memory of one process that another one on the same host can address.

    home      which host and which namespace of processes this is          (home.py)
    window    what an owner says of its memory, and what a peer makes of it (window.py)
    shared    CPU memory: anonymous files that both processes map           (shared.py)
    ipc       GPU memory: CUDA IPC handles                                  (ipc.py)

Importing this package imports neither torch nor CUDA.
"""

from kvxfer.mapped.home import here, unlike
from kvxfer.mapped.window import Export, Window, Windows, export, open_window

__all__ = ["Export", "Window", "Windows", "export", "here", "open_window", "unlike"]
