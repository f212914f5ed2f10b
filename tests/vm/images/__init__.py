"""Tests images on Linux 6.12 and on file systems that this machine may not have."""
