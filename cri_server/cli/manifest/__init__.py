"""A Pod manifest: from its text to a checked Pod, and from that to CRI messages."""
