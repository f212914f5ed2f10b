"""What the server knows: sandboxes and containers in memory, their records on disk, and how both
are found again."""
