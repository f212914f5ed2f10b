"""CRI messages about sandboxes and containers, encoded, from the index alone."""
