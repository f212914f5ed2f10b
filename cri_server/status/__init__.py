"""Builds and encodes the CRI messages about sandboxes and containers from the index, without disk
access."""
