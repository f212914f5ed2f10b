"""Builds the OCI spec of a container from its CRI configuration, its image's configuration and
facts of the node. `build` depends on nothing but its `Inputs`."""
