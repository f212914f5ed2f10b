"""Starts one process of a container. The new process runs the plan's program of system calls; its
parent carries out the plan's parent steps, such as id maps and hooks."""
