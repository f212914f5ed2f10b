"""Builds and encodes the CRI messages about sandboxes and containers. They come from the index,
without disk access."""
