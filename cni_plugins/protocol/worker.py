"""What the server and a worker of our plugins (`cni_plugins.errand`) say to each other, and what
forks beside it are given.

Plugin inputs, results and errors are CNI's JSON objects; both ends read them with
`cni_plugins.protocol`.
"""

from __future__ import annotations

from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath


class Chain(Request):
    """Run plugins of ours in the order of their inputs, each with the result of the one before, the
    first one with `previous`. `environment`: CNI's variables; `loopback`: bring lo up before an
    ADD. Answered with an `Answer`."""

    call = "chain"
    environment: dict[str, str]
    inputs: Sequence[Message]
    loopback: bool = False
    previous: Message | None = None


class Living(Record):
    """An attachment: the variables of its ADD, and the plugins' inputs with their prevResult."""

    environment: dict[str, str]
    inputs: Sequence[Message]


class Restore(Request):
    """Put back host rules of attachments that live. Answered with an `Answer`."""

    call = "restore"
    attachments: Sequence[Living]


class Refused(Record):
    """`error`: the error object of the plugin; `trace`: where an unforeseen exception came from."""

    plugin: str
    error: Message
    trace: str = ""


class Answer(Record):
    """`result`: the last one of an ADD; `restored`: how many elements of rules were missing; or who
    refused. `last`: see `zygote.messages.FromWorker`."""

    result: Message | None = None
    restored: int = 0
    refused: Refused | None = None
    last: bool = False


class Execute(Record):
    """Of `errand.execute`: another's plugin, and its whole environment."""

    program: AbsolutePath
    environment: dict[str, str]


class Install(Record):
    """Of `errand.install`."""

    folder: AbsolutePath
