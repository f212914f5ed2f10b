"""Pod sandboxes: one verb a file."""
