"""How the bytes of a transfer travel, and how the way is chosen."""
