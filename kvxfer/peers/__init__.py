"""Peers: the control streams between workers."""
