"""The profile of RuntimeDefault as data: the calls of every container, by subject, and those that
each capability adds.

It allows the same calls as containerd's and Docker's default profiles of 2026. All other calls fail
with EPERM, or with ENOSYS if they are newer than the list (`stub`). Left out on purpose: io_uring,
keyrings, userfaultfd, kexec, and new namespaces without CAP_SYS_ADMIN. socket(2) has one rule for
each family above AF_ALG. A single rule "greater than AF_VSOCK" would also allow AF_VSOCK with
garbage in the upper half of the register, which the kernel ignores, because the argument is an int.

i386's socketcall(2) passes the family behind a pointer, where no filter sees it (CVE-2026-31431
opened AF_ALG in this way). So making a socket by socketcall(2) fails with ENOSYS. musl, and glibc
built for Linux 4.3, then use socket(2). glibc of Debian, Ubuntu and Fedora for i386 is built for
older kernels and has no other way (seen in Debian 12's 2.36), so 32-bit executables linked to it
have no network under RuntimeDefault. Their pods need another profile (Localhost) or none.
socketcall(2) is allowed for existing sockets, and for socketpair(2), which makes neither AF_ALG nor
AF_VSOCK.
"""

from __future__ import annotations

import errno

from pyrunc.errors import Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

FILES = """
    access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat
    faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2
    fchown fchown32 fchownat fcntl fcntl64 fdatasync flock fstat fstat64 fstatat64 fstatfs fstatfs64
    fsync ftruncate ftruncate64 futimesat getcwd getdents getdents64 inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch ioctl lchown lchown32 link linkat listmount _llseek lseek lstat
    lstat64 memfd_create memfd_secret mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open
    openat openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead
    readlink readlinkat readv rename renameat renameat2 rmdir sendfile sendfile64 splice stat stat64
    statfs statfs64 statmount statx symlink symlinkat sync sync_file_range syncfs tee truncate
    truncate64 umask unlink unlinkat utime utimensat utimensat_time64 utimes vmsplice write writev
"""
EXTENDED_ATTRIBUTES = """
    fgetxattr flistxattr fremovexattr fsetxattr getxattr getxattrat lgetxattr listxattr listxattrat
    llistxattr lremovexattr lsetxattr removexattr removexattrat setxattr setxattrat
"""
WAITING = """
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
    epoll_wait_old eventfd eventfd2 io_cancel io_destroy io_getevents io_pgetevents
    io_pgetevents_time64 io_setup io_submit _newselect pause poll ppoll ppoll_time64 pselect6
    pselect6_time64 select
"""
SOCKETS = """
    accept accept4 bind connect getpeername getsockname getsockopt listen recv recvfrom recvmmsg
    recvmmsg_time64 recvmsg send sendmmsg sendmsg sendto setsockopt shutdown socketpair
"""
MEMORY = """
    brk cachestat madvise map_shadow_stack membarrier mincore mlock mlock2 mlockall mmap mmap2
    mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
    process_mrelease remap_file_pages
"""
PROCESSES = """
    execve execveat exit exit_group fork getcpu getpgid getpgrp getpid getppid getpriority getrandom
    getrlimit get_robust_list getrusage getsid get_thread_area gettid ioprio_get ioprio_set
    pidfd_open pidfd_send_signal prctl prlimit64 process_vm_readv process_vm_writev ptrace
    restart_syscall rseq sched_getaffinity sched_getattr sched_getparam sched_get_priority_max
    sched_get_priority_min sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield setpgid
    setpriority setrlimit set_robust_list setsid set_thread_area set_tid_address sysinfo ugetrlimit
    uname uretprobe vfork wait4 waitid waitpid
"""
IDENTITY = """
    capget capset getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32
    getresgid getresgid32 getresuid getresuid32 getuid getuid32 setfsgid setfsgid32 setfsuid
    setfsuid32 setgid setgid32 setgroups setgroups32 setregid setregid32 setresgid setresgid32
    setresuid setresuid32 setreuid setreuid32 setuid setuid32
"""
SANDBOXING = "landlock_add_rule landlock_create_ruleset landlock_restrict_self seccomp"
SIGNALS = """
    kill rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
    rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sigaltstack signalfd signalfd4
    sigprocmask sigreturn tgkill tkill
"""
SYNCHRONISATION = """
    futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake ipc mq_getsetattr mq_notify
    mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink msgctl
    msgget msgrcv msgsnd semctl semget semop semtimedop semtimedop_time64 shmat shmctl shmdt shmget
"""
TIME = """
    adjtimex alarm clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime
    clock_gettime64 clock_nanosleep clock_nanosleep_time64 getitimer gettimeofday nanosleep
    setitimer time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64
    timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
    timerfd_settime64 times
"""
FOR_ALL = (
    FILES,
    EXTENDED_ATTRIBUTES,
    WAITING,
    SOCKETS,
    MEMORY,
    PROCESSES,
    IDENTITY,
    SANDBOXING,
    SIGNALS,
    SYNCHRONISATION,
    TIME,
)

BY_MACHINE = {
    "x86_64": "arch_prctl modify_ldt",
    "aarch64": """
        arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls sync_file_range2
    """,
}
SUBARCHITECTURES = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
}
BY_CAPABILITY = {
    "CAP_BPF": "bpf",
    "CAP_DAC_READ_SEARCH": "open_by_handle_at",
    "CAP_PERFMON": "perf_event_open",
    "CAP_SYSLOG": "syslog",
    "CAP_SYS_ADMIN": """
        bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie
        lsm_get_self_attr lsm_list_modules lsm_set_self_attr mount mount_setattr move_mount
        open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount
        umount2 unshare
    """,
    "CAP_SYS_BOOT": "reboot",
    "CAP_SYS_CHROOT": "chroot",
    "CAP_SYS_MODULE": "delete_module finit_module init_module",
    "CAP_SYS_NICE": "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
    "CAP_SYS_PACCT": "acct",
    "CAP_SYS_PTRACE": "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev ptrace",
    "CAP_SYS_RAWIO": "ioperm iopl",
    "CAP_SYS_TIME": "clock_settime clock_settime64 settimeofday stime",
    "CAP_SYS_TTY_CONFIG": "vhangup",
}

# NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET of clone(2), which cannot take NEWTIME
NEW_NAMESPACES = 0x7E020000
# LINUX, LINUX32, both with UNAME26, and the query
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
AF_ALG = 38
SYS_SOCKET = 1  # of socketcall(2), linux/net.h
# AF_VSOCK leads to the machine's hypervisor; Docker and containerd leave it out as well.
FAMILIES_AFTER_ALG = (39, 41, 42, 43, 44, 45)


def runtime_default(capabilities: Iterable[str], arch: str) -> dict[str, Any]:
    """Return the OCI `linux.seccomp` object for a bounding set and a machine (uname -m). Raises
    Unsupported for a machine that SUBARCHITECTURES lacks."""
    if arch not in SUBARCHITECTURES:
        raise Unsupported(f"no default seccomp profile for {arch}")
    granted = set(capabilities)
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": list(SUBARCHITECTURES[arch]),
        "syscalls": [
            _allow([name for subject in FOR_ALL for name in subject.split()]),
            _allow(BY_MACHINE[arch].split()),
            _allow_if("socket", AF_ALG, "SCMP_CMP_LT"),
            *(_allow_if("socket", family, "SCMP_CMP_EQ") for family in FAMILIES_AFTER_ALG),
            *_no_new_sockets_by_multiplexer(),
            *(_allow_if("personality", value, "SCMP_CMP_EQ") for value in PERSONALITIES),
            *(
                _allow(names.split())
                for capability, names in BY_CAPABILITY.items()
                if capability in granted
            ),
            *([] if "CAP_SYS_ADMIN" in granted else _no_new_namespaces()),
        ],
    }


def _no_new_namespaces() -> list[dict[str, Any]]:
    """Return the rules that allow clone(2) only without namespace flags. clone3(2) passes its flags
    behind a pointer, where no filter sees them, so it fails with ENOSYS (moby #42681)."""
    clone = _allow_if("clone", NEW_NAMESPACES, "SCMP_CMP_MASKED_EQ")
    return [clone, {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS}]


def _no_new_sockets_by_multiplexer() -> list[dict[str, Any]]:
    new_socket = {"index": 0, "value": SYS_SOCKET, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
    refuse = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS, "args": [new_socket]}
    return [{"names": ["socketcall"], **refuse}, _allow_if("socketcall", SYS_SOCKET, "SCMP_CMP_NE")]


def _allow(names: list[str]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW"}


def _allow_if(name: str, value: int, operator: str) -> dict[str, Any]:
    argument = {"index": 0, "value": value, "valueTwo": 0, "op": operator}
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]}
