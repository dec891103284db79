"""Tools around the library: nothing in its core imports them."""
