"""Tests of the OCI runtime that run in the guest: under podman and containerd, for ordinary users,
through CRIU, confined."""
