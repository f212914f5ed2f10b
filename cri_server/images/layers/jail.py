"""Restricts the processes that decode, unpack or index layers.

A decoder is C code and reads hostile bytes first (CVE class: memory errors in decompression
libraries). It keeps only the system calls for reading, writing and memory. With these it can
neither open a file nor reach a process.

The other jobs, in Python, see one folder, in which they can make files. (A checkpoint's archive is
decoded in such a job, too.) Code that takes over a job has the content, the folder, and a few
capabilities for file ownership. It cannot call execve, open sockets or read the host's files.

- Device nodes are made by the server afterwards, because the job could open them. Whiteouts (device
  0:0) need no privilege since Linux 5.8.
- The folder is the job's root directory, because landlock(7) does not restrict chmod(2), chown(2)
  and setxattr(2): they would work on any file of the host.
- The job keeps CAP_SYS_ADMIN to set `trusted.overlay.opaque`; seccomp refuses the system calls for
  other uses of this capability, such as ioctl(2), which could freeze the file system.
- seccomp also refuses the calls by which uid 0 affects other processes of uid 0 without a
  capability: prlimit(2), F_SETOWN (signals to the owner of a descriptor), System V IPC.
"""

from __future__ import annotations

import os
import signal
import stat

from pyrunc.abi.file import F_SETOWN, F_SETOWN_EX
from pyrunc.errors import ResourceExhausted
from pyrunc.kernel import limit, restrict
from pyrunc.kernel.fd import closing_fd

KEPT_CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP", "CAP_SYS_ADMIN",
)  # fmt: skip
# truncate(2): landlock restricts it only from Linux 6.2 on.
_REFUSED = """
    execve execveat fork vfork clone clone3 unshare setns
    socket socketpair connect bind listen accept accept4 sendmsg sendmmsg recvmsg recvmmsg
    mount umount2 move_mount open_tree open_tree_attr fsopen fspick fsmount fsconfig
    mount_setattr pivot_root chroot swapon swapoff
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd
    pidfd_send_signal kill tkill tgkill kcmp
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register seccomp
    keyctl add_key request_key init_module finit_module delete_module
    kexec_load kexec_file_load reboot
    open_by_handle_at name_to_handle_at truncate truncate64 quotactl quotactl_fd
    acct syslog sethostname setdomainname
    settimeofday clock_settime clock_adjtime adjtimex lookup_dcookie
    iopl ioperm fanotify_init memfd_secret
    ioctl prlimit64 setpriority ioprio_set
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler
    shmget shmat shmctl semget semctl semop semtimedop msgget msgctl msgsnd msgrcv mq_open mq_unlink
"""
# F_SETOWN chooses the process that gets a descriptor's signal, which may be SIGKILL. Landlock
# restricts that only from Linux 6.12 on.
_REFUSED_COMMANDS = {"fcntl": (F_SETOWN, F_SETOWN_EX)}
# With sendto(2) the job reports an error; sendmsg(2) could also pass descriptors to the server. No
# call takes a path, because a seccomp filter cannot read memory behind pointers.
_DECODERS = """
    read pread64 write lseek close sendto
    mmap mremap munmap mprotect madvise brk futex
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall
    clock_gettime getrandom sched_yield getpid gettid exit exit_group
"""
# Compiled once, when the zygote imports this, not in each of its children.
_FILTER = restrict.refusing(_REFUSED.split(), _REFUSED_COMMANDS)
_DECODERS_FILTER = restrict.allowing(_DECODERS.split())
MEMORY_LIMIT_BYTES = 768 << 20  # for jobs with the names of all files in memory
DECODER_MEMORY_LIMIT_BYTES = 320 << 20  # a zstd window is 128 MiB
TAR_MEMORY_LIMIT_BYTES = 192 << 20
CPU_LIMIT_S = 1200  # enough to hash and write 64 GiB, the limit of a layer


def enter(folder: str, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> str:
    """Restrict this single-threaded process to making files beneath `folder`, for the rest of its
    life. `folder` becomes the root directory; return its new path, `/`. Raises KernelError,
    OSError.

    Open files stay usable. Open directories are closed, because they lead out of the jail.
    """
    _limit(memory_limit_bytes)
    _close_directories()
    os.chroot(folder)
    # chroot(2) leaves the working directory outside, from where `..` leads anywhere.
    os.chdir("/")
    with closing_fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        restrict.no_new_privileges()
        restrict.only_beneath([fd])
    # After chroot(2), which needs CAP_SYS_CHROOT.
    restrict.keep_capabilities(KEPT_CAPABILITIES)
    restrict.set_filter(_FILTER)
    return "/"


def enter_decoder() -> None:
    """Restrict this single-threaded process, for the rest of its life, to its open descriptors.
    Raises KernelError."""
    _limit(DECODER_MEMORY_LIMIT_BYTES)
    # seccomp(2) demands this from a process without CAP_SYS_ADMIN.
    restrict.no_new_privileges()
    restrict.keep_capabilities(())
    restrict.set_filter(_DECODERS_FILTER)


def _limit(memory_bytes: int) -> None:
    limit.prlimit(0, "RLIMIT_CORE", 0, 0)
    # RLIMIT_DATA covers private mappings since Linux 4.7 (getrlimit(2)). RLIMIT_AS would also
    # count libraries and the shared memory of rings.
    limit.prlimit(0, "RLIMIT_DATA", memory_bytes, memory_bytes)
    signal.signal(signal.SIGXCPU, _refuse_more_time)
    limit.prlimit(0, "RLIMIT_CPU", CPU_LIMIT_S, CPU_LIMIT_S + 5)


def _refuse_more_time(*_: object) -> None:
    """Raise ResourceExhausted. This is the handler of SIGXCPU: the kernel sends the signal at the
    soft RLIMIT_CPU, and kills the process five seconds later, at the hard limit."""
    raise ResourceExhausted(f"the layer's job took more than {CPU_LIMIT_S} s of processor time")


def _close_directories() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISDIR(os.fstat(int(name)).st_mode):
                os.close(int(name))
        except OSError:  # the descriptor of listdir itself, closed by now
            pass
