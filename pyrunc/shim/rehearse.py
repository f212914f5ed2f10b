"""What a start does is done once in the zygote, before its heap is frozen.

Python specialises a function's code while it runs, fills type caches, and modules fill tables of their own at first use. Done
in the zygote, all of this is shared by every fork; done in each fork, it is paid there, in time and in private pages.
Nothing stays: the holder that is started here, in the host's namespaces, is killed and reaped.
"""

from __future__ import annotations

import os
import signal
import sys

from pyrunc.lifecycle import create, facts
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.model import Findings
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse

ROUNDS = 10  # a function's code is specialised from its eighth call on


def rehearse() -> None:
    """Plan containers, start holders. A failure costs time later, and is reported on stderr."""
    try:
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
    plan = plans.build(
        parse(document),
        facts.host(),
        Findings(),
        load_filter=None,
        cgroup=True,
        sync={},
        await_start=False,
        keyring="rehearsal",
        restrict_oom_score_adj=False,
        preserve=0,
    )
    lower(plan).program.encode()


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
