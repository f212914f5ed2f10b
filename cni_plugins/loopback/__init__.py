"""The plugin loopback: sets the pod's interface `lo` up."""
