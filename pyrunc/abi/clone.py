"""clone3(2), unshare(2), setns(2): flags, the namespaces' names, the layout of `struct clone_args`."""

CSIGNAL = 0xFF
CLONE_NEWTIME = 0x80
CLONE_VM = 0x100
CLONE_FS = 0x200
CLONE_FILES = 0x400
CLONE_SIGHAND = 0x800
CLONE_PIDFD = 0x1000
CLONE_PTRACE = 0x2000
CLONE_VFORK = 0x4000
CLONE_PARENT = 0x8000
CLONE_THREAD = 0x10000
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_CLEAR_SIGHAND = 0x100000000
CLONE_INTO_CGROUP = 0x200000000

# `struct clone_args` of clone3: eleven 64-bit words, in this order
CLONE_ARGS = (
    "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls", "set_tid",
    "set_tid_size", "cgroup",
)  # fmt: skip
CLONE_ARGS_SIZE = 88

# Names as in /proc/PID/ns -> flag
NAMESPACES = {
    "mnt": CLONE_NEWNS,
    "cgroup": CLONE_NEWCGROUP,
    "uts": CLONE_NEWUTS,
    "ipc": CLONE_NEWIPC,
    "user": CLONE_NEWUSER,
    "pid": CLONE_NEWPID,
    "net": CLONE_NEWNET,
    "time": CLONE_NEWTIME,
}
