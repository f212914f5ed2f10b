"""Converts a Pod manifest: from text to a checked Pod, and from that to CRI messages."""
