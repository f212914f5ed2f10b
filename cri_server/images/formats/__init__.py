"""What image content looks like: digests, references, platforms, manifests."""
