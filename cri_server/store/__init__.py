"""The server's sandboxes and containers: in memory, their records on disk, and how both are
restored."""
