"""What a server asks a compiler, and what it answers, which goes on to the shim as it is.

`launch` is a message of `launch.sealed`. A container that another OCI runtime runs, or CRIU brings back, has none: then `runtime`
or `restore` says who does it, `attached` names the places of the mounts that come along, `pinned` those of what the pod pins.
`parts`: where the time went (`pyrunc.parts`).
"""

from __future__ import annotations

from pyrunc.plan.bind_source import BindSource
from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.ipc import Message


class CompileContainer(Request):
    """Of the container whose config.json and launch.json are in `directory`. `images`: paths of the indexes whose mounts come along;
    `sources`: what the server knows of the host paths that are bound, `opened`: those whose descriptors come after the images'.
    Answered with a `CompiledContainer`."""

    call = "container"
    container: str
    directory: str
    images: Sequence[str] = ()
    timed: bool = False
    sources: dict[str, BindSource] | None = None
    opened: Sequence[str] = ()


class CompilePause(Request):
    """Of the pod whose holder.json is in `sandbox_dir`. Answered with a `CompiledPause`."""

    call = "pause"
    sandbox_dir: str
    timed: bool = False


class CompileExec(Request):
    """Of an OCI process object in the container whose first process is `pid`. Answered with a `CompiledExec`."""

    call = "exec"
    directory: str
    pid: int
    process: Message
    tty: bool
    timed: bool = False


class Io(Record):
    """What launch.json says about streams and the log."""

    tty: bool | None = None
    stdin: bool | None = None
    stdin_once: bool | None = None
    log_path: str | None = None
    log_directory: str | None = None


class OtherRuntime(Record):
    """An OCI runtime: its command line. `systemd`: it is to ask systemd for the cgroup."""

    binary: str
    arguments: Sequence[str] = ()
    systemd: bool = False

    @classmethod
    def in_launch(cls, asked: Message) -> OtherRuntime | None:
        """Of launch.json, for a shim, which does without `compiler.files`; None for a container of ours."""
        if not asked.get("runtime"):
            return None
        return cls.of(asked["runtime"]).replace(systemd=asked["cgroup"]["driver"] == "systemd")


class Restore(Record):
    """A container that CRIU brings back: `images` and `work` are folders, `options` those of `checkpoint.Choices`."""

    images: str
    work: str
    options: Message
    cgroup: Message


class CompiledContainer(Record):
    """`state`: what state.json will hold but for the process; `poststart`: hooks, as `launch.sealed.plain` has them."""

    state: Message
    io: Io
    launch: Message | None = None
    runtime: OtherRuntime | None = None
    restore: Restore | None = None
    cgroup: dict[str, str] | None = None
    attached: Sequence[str] = ()
    pinned: dict[str, str] | None = None
    poststart: Sequence[Any] = ()
    poststop: bool = False
    warnings: Sequence[str] = ()
    parts: Sequence[Any] = ()


class CompiledPause(Record):
    """`pins`: names of the pinned mounts, whose descriptors come last; `network`: host, new (with the process) or pinned (the
    shim's)."""

    launch: Message
    network: str | None
    pins: Sequence[str] = ()
    warnings: Sequence[str] = ()
    parts: Sequence[Any] = ()


class CompiledExec(Record):
    """`process`: the OCI process object that another runtime is to run."""

    launch: Message | None = None
    runtime: OtherRuntime | None = None
    process: Message | None = None
    warnings: Sequence[str] = ()
    parts: Sequence[Any] = ()
