"""Checkpoints of containers as archives: CRIU's images, the writable layer, and a description of
the container."""
