"""On a kernel that enforces Debian's policy for SELinux: which labels processes and files have, and
what containers cannot do."""
