"""The messages between the server and a CNI worker (`cni_plugins.jobs.serve`), and the arguments of
the other jobs in that module.

Plugin inputs, results and errors are CNI's JSON objects, which `cni_plugins.protocol` parses on
both sides.
"""

from __future__ import annotations

from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath


class Chain(Request):
    """Run pyrunc's plugins in the order of their inputs, each with the result of the one before,
    the first with `previous`. `environment`: CNI's variables; `loopback`: set lo up before an ADD.
    Answered by an `Answer`."""

    call = "chain"
    environment: dict[str, str]
    inputs: Sequence[Message]
    loopback: bool = False
    previous: Message | None = None


class RestoredAttachment(Record):
    """An attachment: the variables of its ADD, and the plugins' inputs with their prevResult."""

    environment: dict[str, str]
    inputs: Sequence[Message]


class Restore(Request):
    """Restore the host rules of live attachments. Answered by an `Answer`."""

    call = "restore"
    attachments: Sequence[RestoredAttachment]


class PluginError(Record):
    """`error`: the error object of the plugin; `trace`: an unexpected exception's traceback."""

    plugin: str
    error: Message
    trace: str = ""


class Answer(Record):
    """A worker's answer. `result`: of the chain's last plugin, for ADD; `restored`: how many
    elements were missing, for `Restore`; `error`: of the plugin that failed; `last`: the worker's
    memory has grown, so the server sends it no further request."""

    result: Message | None = None
    restored: int = 0
    error: PluginError | None = None
    last: bool = False


class ExecutePlugin(Record):
    """The arguments of `jobs.execute`: a foreign plugin, and its whole environment."""

    program: AbsolutePath
    environment: dict[str, str]


class InstallPlugins(Record):
    """The arguments of `jobs.install`."""

    folder: AbsolutePath
