"""A kernel that runs until it is told to end. Import this only where there is a GPU: it needs triton."""

# pyright: basic
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

__all__ = ["spin"]


@triton.jit
def spin(word):
    """Run until a word is set, by whoever else can write it: on the stream of the context, `spin[(1,)](word)`."""
    while tl.load(word, volatile=True) == 0:
        pass
