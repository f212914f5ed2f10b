"""Talking to registries: their hosts, logging in, manifests and blobs over HTTP."""
