"""Bytes only: frame headers, control messages, codes. Knows no sockets, no threads, no torch."""
