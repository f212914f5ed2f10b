"""What a start does is done once in the zygote, before its heap is frozen.

Python specialises a function's code while it runs, fills type caches, and modules fill tables of their own at first use. Done
in the zygote, all of this is shared by every fork; done in each fork, it is paid there, in time and in private pages.
Nothing stays: the holder that is started here, in the host's namespaces, is killed and reaped.
"""

from __future__ import annotations

import os
import signal
import sys

from pyrunc import jsontext
from pyrunc.cgroups import convert, device_filter, limits
from pyrunc.kernel import bpf
from pyrunc.lifecycle import create, facts
from pyrunc.lifecycle.exec import merged
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.model import Findings
from pyrunc.seccomp import compiler
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse

LATE = (convert, device_filter, limits, bpf, compiler)  # what the library imports at the first use only
SYSTEMD_RUNS = "/run/systemd/system"  # sd_booted(3)
ROUNDS = 10  # a function's code is specialised from its eighth call on


def rehearse() -> None:
    """Plan containers, start holders. A failure costs time later, and is reported on stderr."""
    try:
        if os.path.isdir(SYSTEMD_RUNS):
            __import__("pyrunc.cgroups.scope")
        for _ in range(ROUNDS):
            _plan()
            _start()
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        _forget_pause()


def _plan() -> None:
    document = default()
    document["linux"]["cgroupsPath"] = "/rehearsal"
    spec = parse(jsontext.loads(jsontext.dumps(document)))
    check(spec)
    lower(plans.build(spec, facts.host(), Findings(), cgroup=True, keyring="rehearsal")).program.encode()
    process = merged(spec, {"args": ["true"], "cwd": "/", "terminal": False})
    lower(plans.build_exec(spec.linux, process, facts.host(), cgroup=True)).program.encode()
    for rules in (
        [{"allow": False, "access": "rwm"}],
        [{"allow": True, "type": "c", "major": 1, "access": "rwm"}],
    ):
        device_filter.program(rules)


def _start() -> None:
    held = create.holder(create.HolderRequest(id="rehearsal", namespaces={"uts": "new"}, cgroup=None))
    os.close(held.pidfd)
    os.kill(held.pid, signal.SIGKILL)
    os.waitpid(held.pid, 0)


def _forget_pause() -> None:
    """The sealed pause program is a descriptor, and a child of the zygote has none of its own: it makes it again."""
    if create._pause is not None:
        os.close(create._pause)
        create._pause = None
