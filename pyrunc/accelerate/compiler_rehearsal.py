"""What a compiler does is done once in the zygote, before its heap is frozen.

Python specialises a function's code while it runs, fills type caches, and modules fill tables of their own at first use. Done
in the zygote, all of this is shared by every fork; done in each fork, it is paid there, in time and in private pages.
Nothing is started here.
"""

from __future__ import annotations

import os
import sys

from pyrunc import jsontext
from pyrunc.cgroups import convert, device_filter, limits
from pyrunc.compile import host as facts
from pyrunc.compile.exec import merged
from pyrunc.kernel import bpf, seccomp
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.model import Findings
from pyrunc.seccomp import compiler
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROCESSORS = "/sys/devices/system/cpu"
LATE = (
    convert,
    device_filter,
    limits,
    bpf,
    seccomp,
    compiler,
)  # what the library imports at the first use only
SYSTEMD_RUNS = "/run/systemd/system"  # sd_booted(3)
ROUNDS = 10  # a function's code is specialised from its eighth call on


def rehearse() -> None:
    """Plan containers. A failure costs time later, and is reported on stderr."""
    try:
        if os.path.isdir(SYSTEMD_RUNS):
            __import__("pyrunc.cgroups.scope")
        for _ in range(ROUNDS):
            _plan()
    except Exception:
        sys.excepthook(*sys.exc_info())


def _like_a_pods(document: dict[str, Any]) -> None:
    """What kubelet and the server write into most configurations: a plan's parts are lowered once and then found again
    (`plan.stock`), if they are exactly these."""
    mounts = [m for m in document["mounts"] if m["destination"] != "/dev/shm"]
    mounts[0]["options"] = ["nosuid", "noexec", "nodev"]
    names = (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "NET_RAW",
        "SETFCAP",
        "SETGID",
    )
    held = [f"CAP_{name}" for name in (*names, "SETPCAP", "SETUID", "SYS_CHROOT", "AUDIT_WRITE")]
    document["mounts"] = mounts
    document["root"]["readonly"] = False
    document["process"]["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), held)
    hidden = (
        "asound",
        "acpi",
        "interrupts",
        "kcore",
        "keys",
        "latency_stats",
        "timer_list",
        "timer_stats",
        "sched_debug",
        "scsi",
    )
    processors = [f"{PROCESSORS}/{name}/thermal_throttle" for name in sorted(os.listdir(PROCESSORS))]
    document["linux"]["maskedPaths"] = [
        *(f"/proc/{name}" for name in hidden),
        "/sys/firmware",
        "/sys/devices/virtual/powercap",
        *filter(os.path.exists, processors),
    ]


def _plan() -> None:
    document = default()
    document["linux"]["cgroupsPath"] = "/rehearsal"
    _like_a_pods(document)
    spec = parse(jsontext.loads(jsontext.dumps(document)))
    check(spec)
    lower(
        plans.build(spec, facts.host(), Findings(), plans.StartOptions(keyring="rehearsal"))
    ).program.encode()
    process = merged(spec, {"args": ["true"], "cwd": "/", "terminal": False})
    lower(plans.build_exec(spec.linux, process, facts.host())).program.encode()
    for rules in (
        [{"allow": False, "access": "rwm"}],
        [{"allow": True, "type": "c", "major": 1, "access": "rwm"}],
    ):
        device_filter.program(rules)
