"""Memory of one process that another one on the same host can address.

    host      this host and its processes, windows onto their memory, open files; CPU memory     (host.py)
    gpu       GPU memory: CUDA IPC handles, fabric handles, or open files                        (gpu.py)

Importing them imports neither torch nor CUDA.
"""
