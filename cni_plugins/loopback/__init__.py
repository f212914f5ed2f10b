"""loopback: the pod's `lo`."""
