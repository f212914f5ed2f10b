"""Images: pulled from a registry or loaded from an archive into an OCI image layout on disk, and
mounted or unpacked for containers."""
