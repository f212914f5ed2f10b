"""The numbers of capabilities(7), as in linux/capability.h, and the version of capset(2)'s
header."""

from __future__ import annotations

from pyrunc.abi.numbered import numbered

CAPABILITIES = numbered("""
      0 CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL CAP_SETGID
      7 CAP_SETUID CAP_SETPCAP CAP_LINUX_IMMUTABLE
     10 CAP_NET_BIND_SERVICE CAP_NET_BROADCAST CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK
     15 CAP_IPC_OWNER CAP_SYS_MODULE CAP_SYS_RAWIO CAP_SYS_CHROOT CAP_SYS_PTRACE
     20 CAP_SYS_PACCT CAP_SYS_ADMIN CAP_SYS_BOOT CAP_SYS_NICE CAP_SYS_RESOURCE CAP_SYS_TIME
     26 CAP_SYS_TTY_CONFIG CAP_MKNOD CAP_LEASE CAP_AUDIT_WRITE
     30 CAP_AUDIT_CONTROL CAP_SETFCAP CAP_MAC_OVERRIDE CAP_MAC_ADMIN CAP_SYSLOG CAP_WAKE_ALARM
     36 CAP_BLOCK_SUSPEND CAP_AUDIT_READ CAP_PERFMON CAP_BPF
     40 CAP_CHECKPOINT_RESTORE
""")
CAP_SYS_ADMIN = 21

# struct __user_cap_header_struct {u32 version; int pid}, then two times {u32 effective, permitted,
# inheritable}
LINUX_CAPABILITY_VERSION_3 = 0x20080522

# The set that every runtime grants by default, and that Kubernetes' documentation refers to.
DEFAULT_CAPABILITIES = frozenset(
    {
        "CAP_AUDIT_WRITE",
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_MKNOD",
        "CAP_NET_BIND_SERVICE",
        "CAP_NET_RAW",
        "CAP_SETFCAP",
        "CAP_SETGID",
        "CAP_SETPCAP",
        "CAP_SETUID",
        "CAP_SYS_CHROOT",
    }
)
