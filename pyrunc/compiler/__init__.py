"""Launches for the shims, made in processes that stay warm."""
