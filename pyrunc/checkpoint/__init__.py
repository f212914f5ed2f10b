"""Checkpoint and restore of containers with CRIU."""
