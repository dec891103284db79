"""Copies: any plan, on whatever memory it names.

    port      what an executor offers                                   (port.py)
    host      plans on CPU memory, with numpy views                     (host.py)
    cuda      plans on a GPU: streams, table rings, events              (cuda.py; tables.py, ring.py)
    kernel    the Triton kernel behind it: the one module that imports triton
    jobs      the waiting room and the book of unreported jobs that executors share

Importing this package imports neither torch nor triton.
"""

from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event, Executor

__all__ = ["READY", "CopyJob", "CopyOutcome", "Direction", "Event", "Executor"]
