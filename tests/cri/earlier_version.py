"""A server like the last version without a keeper: each pod has its own shim, which speaks shim
protocol 2. Started as `python -m tests.cri.earlier_version serve …`.

Its calls, records on disk and descriptors were compared with that version's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cri_server.pod.earlier import PROTOCOL, Keep, KeptContainer, KeptPause
from cri_server.pod.processes import ShimProcess, ShimProcesses
from cri_server.store.facts import ProcessIdentity
from pyrunc.compile.requests import PauseRequest
from pyrunc.errors import WrongState
from pyrunc.shim import messages
from pyrunc.shim.keeper_link import KeeperLink
from pyrunc.shim.loop import EventLoop
from pyrunc.shim.pod import ShimPod
from pyrunc.shim.serve import ShimCall, handler

if TYPE_CHECKING:
    from pyrunc.shim.serve import Handler

_calls, _connect_keeper = ShimPod._calls, KeeperLink.__init__


def calls_of_protocol_2(pod: ShimPod) -> list[Handler]:
    """Return the handlers of a pod's shim in protocol 2, which has the call `keep`."""

    def keep(call: ShimCall, request: Keep) -> None:
        if request.container is not None:
            record, fds = pod._running(request.container).store()
            call.answer(KeptContainer(record), fds)
        elif pod._pause is None or not pod._pause_running:
            raise WrongState("the pod's pause process is not running")
        else:
            stored, fds = pod._pause.store()
            call.answer(KeptPause(stored), fds)

    return [*_calls(pod), handler(Keep, keep)]


def without_keeper(link: KeeperLink, loop: EventLoop, folder: str | None) -> None:
    """Leave `link` without a connection, because the shims of this version have no keeper."""
    _connect_keeper(link, loop, None)


def shim_without_pods(
    processes: ShimProcesses, pods: Mapping[ProcessIdentity, int]
) -> ShimProcess | None:
    """Return a shim that has no pod yet, or None."""
    unused = (s for s in processes._shims if s.process not in pods and not s.taking)
    return next(unused, None)


messages.PROTOCOL = PROTOCOL
messages.LOCK = messages.LOG
PauseRequest.name = PauseRequest.earlier_name
ShimPod._calls = calls_of_protocol_2  # type: ignore[method-assign]
KeeperLink.__init__ = without_keeper  # type: ignore[method-assign]
ShimProcesses._least_loaded = shim_without_pods  # type: ignore[method-assign]

if __name__ == "__main__":
    from cri_server import app
    from cri_server.cli.main import main
    from cri_server.pod.keeper import KeeperWatch
    from cri_server.zygote.client import Zygote

    app.SHIM_MODULES.append("tests.cri.earlier_version")  # the zygote imports it
    app.Zygote = lambda modules, keeper=None: Zygote(modules)  # type: ignore[misc,assignment]
    KeeperWatch.begin = lambda watch: None  # type: ignore[method-assign]
    main()
