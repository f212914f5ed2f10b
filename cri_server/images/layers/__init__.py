"""Makes a layer's files from its blob: decodes, reads the tar and unpacks, in jailed processes."""
