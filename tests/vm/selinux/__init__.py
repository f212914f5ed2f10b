"""Tests on a kernel that enforces Debian's policy for SELinux: labels of processes and files, and
actions that containers are refused."""
