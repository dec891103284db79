"""Bounds that more than one layer checks."""

from typing import Final

__all__ = [
    "MAX_FACTS",
    "MAX_HANDLE",
    "MAX_LAYERS",
    "MAX_NAME",
    "MAX_PLACES",
    "MAX_ROWS",
    "MAX_SCALES",
    "MAX_STRIDE",
    "MAX_SUMS",
    "MAX_TENSORS",
    "MAX_TOKENS",
    "MAX_TRACE",
    "MAX_WIDTH",
    "MAX_WORLD",
]

MAX_SCALES: Final = 65_536
"""Numbers in the scale of one cache tensor at most."""
MAX_WORLD: Final = 16_384
"""Ranks of an engine at most: what a card and a ticket may name."""

MAX_NAME: Final = 128
"""Characters of a name, such as that of a group or of a fact, at most."""

MAX_TENSORS: Final = 16_384
"""Cache tensors of a rank at most."""

MAX_HANDLE: Final = 256
"""Bytes of a handle at most, by which a peer opens memory or a file."""

MAX_LAYERS: Final = 16_384
"""Layers of a model at most."""

MAX_PLACES: Final = 32_768
"""Layers that a rank holds at most, counted once for each part, K, V and tensor: whoever meets it looks at each."""

MAX_TRACE: Final = 64
"""Characters at most by which a fetch names the trace that it belongs to: a `traceparent` of version 00 has 55."""

MAX_TOKENS: Final = 0xFFFF_FFFF
"""Token numbers travel in 32 bits."""

MAX_ROWS: Final = 1 << 24
"""Rows that a plan cuts a range of tokens into at most, those of other ranks' turns included: each takes memory."""

MAX_WIDTH: Final = 1 << 24
"""Coordinates on a head or dim axis at most: plans look at each."""

MAX_CTAS: Final = 4096
"""Thread blocks of a copy at most: more than any GPU runs at once."""

MAX_STRIDE: Final = 1 << 47
"""Bytes from one index of an axis to the next are fewer: no address space is larger."""

MAX_SUMS: Final = 8192
"""Sums over the regions of a chunk at most, and as many over its rows: where there are more, neighbours share one."""

MAX_FACTS: Final = 1024
"""Facts that two ranks compare when they meet, at most: the model, and four of each tensor class."""
