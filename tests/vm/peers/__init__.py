"""What other engines write, read by ours, where the real CRIU is at hand."""
