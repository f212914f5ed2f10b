"""A child that was forked before it is asked for: forking, and the page faults of a fresh copy, happen while nobody waits.

It serves one request and is never used again. It waits on a socket whose other end only the zygote has, so it ends with the
zygote, however that ends. A spare that has died is noticed when it is given its request; another child is forked then.
"""

from __future__ import annotations

from _socket import AF_UNIX, SHUT_RD, SOCK_SEQPACKET, socket, socketpair

from pyrunc import ipc
from pyrunc.kernel import reaper
from pyrunc.zygote import child, preload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.zygote.child import Function

NAME = "pyrunc-spare"


class Spare:
    """One child that waits.

    Of a module that has `prepare(fds)` it is called in the child first; children of that one must not keep `fds`. It returns
    what it has made, a JSON object for whoever asks for the child.
    """

    def __init__(self, function: str) -> None:
        """Raises Error if there is no such function, OSError."""
        self._socket, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        try:
            self.pid = child.fork_detached(_waiting_for(function), {}, [theirs.fileno()])
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def give(self, arguments: Message, fds: Sequence[int]) -> Message | None:
        """Its request; what it has prepared (nothing while it is not done with that), None when it has died."""
        try:
            ipc.send(self._socket, arguments, fds)
            # It can say nothing from here on. A message that was left unread would break its connection (ECONNRESET) before
            # it has read the request (unix_release_sock, net/unix/af_unix.c).
            self._socket.shutdown(SHUT_RD)
            received = ipc.receive(self._socket)
        except (BrokenPipeError, ConnectionResetError):
            return None
        finally:
            self._socket.close()
        if not received:
            return {}
        prepared, stray = received
        ipc.close_all(stray)
        return prepared


def _waiting_for(name: str) -> Function:
    """What the child does."""
    function = preload.resolve(name)

    def wait(_: Message, fds: list[int]) -> Any:
        reaper.set_name(NAME)
        prepare = preload.hook(name, "prepare")
        requests = socket(fileno=fds[0])
        if prepare:
            prepared = prepare(fds)
            try:
                ipc.send(requests, prepared)
            except BrokenPipeError:  # it was given its request meanwhile, or the zygote has ended
                pass
        received = ipc.receive(requests)
        requests.close()
        if received is None:
            return 0
        arguments, given = received
        return function(arguments, given)

    return wait
