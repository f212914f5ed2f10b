"""One OCI verb per file, and the container's state on disk; used by the command line, the shim and tests."""
