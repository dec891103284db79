"""Memory of one process that another one on the same host can address.

    home          which host and which namespace of processes this is              (home.py)
    process       which process is which, whatever namespace it is in              (process.py)
    window        what an owner says of its memory, and what a peer makes of it    (window.py)
    shared        CPU memory: anonymous files that both processes map              (shared.py)
    cuda          GPU memory: which handle fits, what two GPUs must be able to do  (cuda.py)
    ipc           allocations of cudaMalloc: CUDA IPC handles                      (ipc.py)
    vmm           memory of cuMemMap: fabric handles, or open files                (vmm.py)
    descriptors   open files that another process may take                         (descriptors.py)

Importing this package imports neither torch nor CUDA.
"""

from kvxfer.mapped.cpu import check_process
from kvxfer.mapped.process import elsewhere, here, may_be_elsewhere, number_of, own_number, process_of_stream, unlike
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
