"""What makes things faster and can be removed without changing what happens."""
