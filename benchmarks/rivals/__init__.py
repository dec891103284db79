"""What one would take instead of kvxfer to move scattered pieces, for `kvxfer bench rivals`.

Each module is one rival and has

    VARIANTS             names, one a way to use it
    missing(variant, device) -> str
                         why it cannot run here; empty if it can
    class Rival(variant, side, source, sink, piece_bytes)
                         set up, not timed; `side` talks to the other process (`send`, `receive`, `device`);
                         `source` and `sink` are int64 tensors with one row a piece, None in the process of the other
        TIMED            "source" or "sink": in which process a move is timed
        move(sources, sinks)
                         move row `sources[i]` to row `sinks[i]`, for all i; returns when it is done as far as this
                         process can know. Called in the process of the source.
        serve(sources, sinks)
                         what the other process does meanwhile
        close()          undo what was set up
"""

MODULES = ("nixl_pieces", "mooncake", "nccl")
