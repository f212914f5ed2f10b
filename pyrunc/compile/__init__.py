"""Compiles requests into launches: the half that reads the host (descriptors, sources, the
root's files, id maps, facts of the machine)."""
