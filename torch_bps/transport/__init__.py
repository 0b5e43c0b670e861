"""Moves (header, buffer) between two peers. Knows no keys, no sums, no groups."""
