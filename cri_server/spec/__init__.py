"""Builds the OCI spec of a container from its CRI configuration, its image's configuration and
facts of the node; a pure function of `Inputs`."""
