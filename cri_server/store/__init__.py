"""Stores the server's sandboxes and containers: the index in memory and the records on disk. Also
claims, checks and cleans up the root and state directories."""
