"""Parses and checks image content: digests, references, platforms, manifests."""
