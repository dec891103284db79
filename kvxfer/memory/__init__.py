"""The books of memory: who holds which bytes of the arena, and which of the caller's blocks are spoken for.

Synchronous and deterministic: no clock, and every decision is returned for the caller to carry out. Only `device`
touches real memory.
"""
