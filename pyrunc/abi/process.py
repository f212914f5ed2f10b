"""prlimit(2), ioprio_set(2), sched_setattr(2): numbers that the standard library lacks or names
otherwise."""

RLIMITS: dict[str, int] = {
    "RLIMIT_CPU": 0,
    "RLIMIT_FSIZE": 1,
    "RLIMIT_DATA": 2,
    "RLIMIT_STACK": 3,
    "RLIMIT_CORE": 4,
    "RLIMIT_RSS": 5,
    "RLIMIT_NPROC": 6,
    "RLIMIT_NOFILE": 7,
    "RLIMIT_MEMLOCK": 8,
    "RLIMIT_AS": 9,
    "RLIMIT_LOCKS": 10,
    "RLIMIT_SIGPENDING": 11,
    "RLIMIT_MSGQUEUE": 12,
    "RLIMIT_NICE": 13,
    "RLIMIT_RTPRIO": 14,
    "RLIMIT_RTTIME": 15,
}
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
