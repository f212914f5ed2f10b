"""Tests that our server restores checkpoints of other engines with the real CRIU."""
