"""Images: from a reference to layers that are mounted or unpacked, by a registry or an archive; an
OCI image layout on disk."""
