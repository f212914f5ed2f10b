"""Images as files: docker-archives and OCI archives, written and read."""
