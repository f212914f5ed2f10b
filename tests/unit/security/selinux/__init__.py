"""Tests of SELinux labels, against fakes of the kernel's files."""
