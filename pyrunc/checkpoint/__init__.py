"""Containers written to disk and brought back by CRIU."""
