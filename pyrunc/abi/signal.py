"""The sizes of the kernel's structures for sigaction(2) and sigprocmask(2), which are the same on
x86-64 and arm64."""

# The kernel's sigset_t is one 64-bit word; its struct sigaction: handler, flags, restorer, mask.
SIGSET_SIZE = 8
SIGACTION_SIZE = 32
SA_RESTORER = 0x04000000
