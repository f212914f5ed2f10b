"""The numbers of the Linux ABI (flags, requests, system calls) by the names of the manual pages."""
