"""Tests on Linux 6.1 (Debian 12): unpacked images, images of many layers, and volumes in memory,
for which the kernel lacks id-mapped mounts."""
