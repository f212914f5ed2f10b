"""signal(7): name -> number, the same on x86-64 and arm64; sigprocmask(2) requests; sizes of the kernel's structures."""

SIGNALS: dict[str, int] = {
    "SIGHUP": 1,
    "SIGINT": 2,
    "SIGQUIT": 3,
    "SIGILL": 4,
    "SIGTRAP": 5,
    "SIGABRT": 6,
    "SIGIOT": 6,
    "SIGBUS": 7,
    "SIGFPE": 8,
    "SIGKILL": 9,
    "SIGUSR1": 10,
    "SIGSEGV": 11,
    "SIGUSR2": 12,
    "SIGPIPE": 13,
    "SIGALRM": 14,
    "SIGTERM": 15,
    "SIGSTKFLT": 16,
    "SIGCHLD": 17,
    "SIGCLD": 17,
    "SIGCONT": 18,
    "SIGSTOP": 19,
    "SIGTSTP": 20,
    "SIGTTIN": 21,
    "SIGTTOU": 22,
    "SIGURG": 23,
    "SIGXCPU": 24,
    "SIGXFSZ": 25,
    "SIGVTALRM": 26,
    "SIGPROF": 27,
    "SIGWINCH": 28,
    "SIGIO": 29,
    "SIGPOLL": 29,
    "SIGPWR": 30,
    "SIGSYS": 31,
    "SIGRTMIN": 34,
    "SIGRTMAX": 64,
    **{f"SIGRTMIN+{n}": 34 + n for n in range(1, 16)},
    **{f"SIGRTMAX-{n}": 64 - n for n in range(1, 15)},
}
SIG_BLOCK = 0
SIG_UNBLOCK = 1
SIG_SETMASK = 2
# The kernel's sigset_t is one 64-bit word; its struct sigaction: handler, flags, restorer, mask.
SIGSET_SIZE = 8
SIGACTION_SIZE = 32
SA_RESTORER = 0x04000000
