"""Reads facts of the host: cgroups, security modules, limits, features of other OCI runtimes."""
