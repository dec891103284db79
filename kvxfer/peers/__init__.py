"""Peers: the control streams between workers, and the lanes that bytes take."""
