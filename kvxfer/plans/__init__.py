"""Plans of transfers, and the route that each takes."""
