"""One OCI verb per file, and what they share: the container on disk, its status."""
