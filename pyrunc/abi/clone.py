"""The flags of clone3(2), unshare(2) and setns(2), the names of namespaces, and the size of
`struct clone_args`."""

CLONE_NEWTIME = 0x80
CLONE_PARENT = 0x8000
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_INTO_CGROUP = 0x200000000

# `struct clone_args` of clone3: eleven 64-bit words: flags, pidfd, child_tid, parent_tid,
# exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup
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
