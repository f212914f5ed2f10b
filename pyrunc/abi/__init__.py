"""The numbers of the Linux ABI (flags, requests, system calls), under their names in the manual
pages."""
