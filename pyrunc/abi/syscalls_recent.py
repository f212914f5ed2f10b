"""The system calls that came with Linux 5.1 or later, which have one number on all architectures.

Sources: asm-generic/unistd.h of Linux 6.1, kernel scripts/syscall.tbl up to Linux 6.17.
"""

from __future__ import annotations

from pyrunc.abi.numbered import numbered

SHARED = numbered("""
    424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount
    430 fsopen fsconfig fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd
    439 faccessat2
    440 process_madvise epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset
    445 landlock_add_rule landlock_restrict_self memfd_secret process_mrelease futex_waitv
    450 set_mempolicy_home_node
""")

# Of Linux 6.5 to 6.17: newer than libseccomp 2.5.4, which ends at 450.
RECENT = numbered("""
    451 cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount
    458 listmount lsm_get_self_attr
    460 lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat
    467 open_tree_attr file_getattr file_setattr
""")
