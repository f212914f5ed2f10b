"""The server's clients of its zygotes and of their workers."""
