"""Facts of the host: cgroups, security modules, limits, and what OCI runtimes on it support."""
