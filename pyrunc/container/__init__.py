"""The OCI verbs, one per file, and what they share: the container's state on disk and its
status."""
