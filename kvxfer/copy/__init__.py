"""Copies: any plan, on whatever memory it names.

    port      what a copy is, and what guards it                        (port.py)
    mover     the loop's side: records out, events in                   (mover.py)
    machine   what moves bytes, compiled: it needs no interpreter       (machine.py, compiler.py)
    tables    a plan as words that a GPU and a CPU walk                 (tables.py)
    template  the same tables for a pair that is known, compiled        (template.py, binding.py)
    walk      the same tables on CPU memory, compiled                   (walk.py)
    cuda      what the machine needs of a GPU                           (cuda.py)
    kernel    the Triton kernel: the one module that imports triton     (kernel.py)

Importing this package imports neither torch, numba nor triton.
"""
