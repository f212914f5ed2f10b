"""The constants of prlimit(2), ioprio_set(2) and sched_setattr(2) that Python's standard library
lacks or has under other names."""

from __future__ import annotations

from pyrunc.abi.numbered import numbered

RLIMITS = numbered("""
      0 RLIMIT_CPU RLIMIT_FSIZE RLIMIT_DATA RLIMIT_STACK RLIMIT_CORE RLIMIT_RSS RLIMIT_NPROC
      7 RLIMIT_NOFILE RLIMIT_MEMLOCK RLIMIT_AS
     10 RLIMIT_LOCKS RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME
""")
RLIM_INFINITY = (1 << 64) - 1

SCHED_POLICIES: dict[str, int] = {
    "SCHED_OTHER": 0,
    "SCHED_FIFO": 1,
    "SCHED_RR": 2,
    "SCHED_BATCH": 3,
    "SCHED_ISO": 4,
    "SCHED_IDLE": 5,
    "SCHED_DEADLINE": 6,
}
SCHED_FLAGS: dict[str, int] = {
    "SCHED_FLAG_RESET_ON_FORK": 0x01,
    "SCHED_FLAG_RECLAIM": 0x02,
    "SCHED_FLAG_DL_OVERRUN": 0x04,
    "SCHED_FLAG_KEEP_POLICY": 0x08,
    "SCHED_FLAG_KEEP_PARAMS": 0x10,
    "SCHED_FLAG_UTIL_CLAMP_MIN": 0x20,
    "SCHED_FLAG_UTIL_CLAMP_MAX": 0x40,
}
IOPRIO_WHO_PROCESS = 1
IOPRIO_CLASS_SHIFT = 13
IOPRIO_CLASSES: dict[str, int] = {
    "IOPRIO_CLASS_RT": 1,
    "IOPRIO_CLASS_BE": 2,
    "IOPRIO_CLASS_IDLE": 3,
}
