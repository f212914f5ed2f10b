"""One process of a container is started: the plan's program runs, its parent carries out the
parent's steps."""
