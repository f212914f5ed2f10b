"""Tests of Linux 6.1 (Debian 12): features that it has in another form than newer kernels, and one
that it lacks."""
