"""The messages between the server and a CNI worker (`cni_plugins.jobs.serve`), and the arguments of
the other jobs in `cni_plugins.jobs`.

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
    """A request to run pyrunc's plugins in the order of `inputs`. Each plugin gets the result of
    the previous plugin. The answer is an `Answer`.

    - `environment`: CNI's variables
    - `loopback`: set `lo` up before an ADD
    - `previous`: the result that the first plugin gets
    """

    call = "chain"
    environment: dict[str, str]
    inputs: Sequence[Message]
    loopback: bool = False
    previous: Message | None = None


class RestoredAttachment(Record):
    """An attachment to restore. `environment`: the variables of its ADD; `inputs`: the plugins'
    inputs with prevResult."""

    environment: dict[str, str]
    inputs: Sequence[Message]


class Restore(Request):
    """A request to restore the nftables rules of live attachments. The answer is an `Answer`."""

    call = "restore"
    attachments: Sequence[RestoredAttachment]


class PluginError(Record):
    """The error of `plugin`. `error`: CNI's error object; `trace`: the traceback of an unexpected
    exception, else empty."""

    plugin: str
    error: Message
    trace: str = ""


class Answer(Record):
    """A worker's answer.

    - `result`: after an ADD, the result of the last plugin.
    - `restored`: after a `Restore`, how many nftables elements were missing.
    - `error`: the error of the plugin that failed.
    - `last`: the worker's memory has grown, so the server must send it no further request.
    """

    result: Message | None = None
    restored: int = 0
    error: PluginError | None = None
    last: bool = False


class ExecutePlugin(Record):
    """The arguments of `jobs.execute`. `program`: the path of a plugin that is not pyrunc's;
    `environment`: the plugin's whole environment."""

    program: AbsolutePath
    environment: dict[str, str]


class InstallPlugins(Record):
    """The arguments of `jobs.install`: the folder that gets the executables."""

    folder: AbsolutePath
