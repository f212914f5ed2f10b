"""Checkpoints of containers as archives on disk: what CRIU wrote, the writable layer, and what the
container was."""
