"""Images as files: reads, writes and builds docker-archives and OCI archives."""
