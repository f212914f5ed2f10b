"""Whether this machine can be a node: what is missing or wrong, what follows from it, and the
command that mends it."""
