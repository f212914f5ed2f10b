"""Images: from a reference to unpacked layers, by a registry or an archive; an OCI image layout on disk."""
