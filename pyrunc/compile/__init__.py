"""Compiles requests into launches: opens descriptors, and reads the root's files, id maps and facts
about the machine."""
