"""Containers: one verb a file, and how a CRI configuration becomes an OCI spec (`spec/`)."""
