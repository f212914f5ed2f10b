"""The CRI verbs of containers, one per file; `cri_server/spec` builds the OCI spec of a CRI
configuration."""
