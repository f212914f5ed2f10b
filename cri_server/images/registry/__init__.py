"""Talks to registries over HTTP: finds their hosts, logs in, transfers manifests and blobs."""
