"""Unpacks layers in jailed processes: decompresses the blob, reads the tar in it and writes the
files."""
