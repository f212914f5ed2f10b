"""The server's sandboxes and containers: the index in memory, the records on disk, and the claim,
check and clean-up of the two directories."""
