"""Compiles requests into launches: opens descriptors and sources, and reads the root's files, id
maps and facts of the machine."""
