"""Builds and encodes the CRI messages about sandboxes and containers. They come from the server's
index, without disk access."""
