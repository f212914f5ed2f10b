"""The CRI verbs of pod sandboxes, one per file."""
