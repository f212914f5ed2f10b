"""On a kernel that runs SELinux with Debian's policy, permissive: which labels processes and files really have."""
