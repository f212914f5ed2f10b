"""Starts one process of a container: the process runs the plan's program, its parent carries out
the parent's steps."""
