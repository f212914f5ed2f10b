"""The verbs that use CRIU: checkpoint, restore."""

from __future__ import annotations

import os

from pyrunc.container import state as states
from pyrunc.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.cli.log import CommandLog
    from pyrunc.cli.parse import CommandLine
    from pyrunc.container.bundle import Bundle, CreateOptions
    from pyrunc.container.process import ContainerProcess
    from pyrunc.container.state import State


def checkpoint(call: CommandLine, log: CommandLog) -> int:
    """Run `checkpoint --image-path DIR ID`. The container is destroyed afterwards, except with
    --leave-running and --pre-dump."""
    from pyrunc.checkpoint.checkpoint import CriuOptions, DumpOptions
    from pyrunc.checkpoint.checkpoint import checkpoint as dump
    from pyrunc.container.delete import destroy

    options = call.options
    how = DumpOptions(
        leave_running=options["leave_running"],
        pre_dump=options["pre_dump"],
        parent_path=options["parent_path"] or "",
        page_server=options["page_server"] or "",
        status_fd=_descriptor(options["status_fd"]),
        tcp_skip_in_flight=options["tcp_skip_in_flight"],
    )
    choices = CriuOptions(**_folders(options))
    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    # Locked during the dump and the removal, so that no other command sees a container whose
    # processes are gone but whose files are not.
    with states.Lock(state) as state:
        dump(state, choices, how)
        if not (how.leave_running or how.pre_dump):
            log.warnings(destroy(state))
    return 0


def restore(call: CommandLine, log: CommandLog) -> int:
    """Run `restore --bundle DIR --image-path DIR ID`; returns 0 with --detach, else the exit code
    of the container's command."""
    from pyrunc.checkpoint.checkpoint import CriuOptions
    from pyrunc.checkpoint.restore import Labels
    from pyrunc.checkpoint.restore import restore as bring_back
    from pyrunc.cli.container import attend_and_delete, become_subreaper, cgroup_options
    from pyrunc.cli.fd_passing import open_missing_stdio, pass_descriptors
    from pyrunc.container import bundle as bundles
    from pyrunc.kernel.terminal import clear_onlcr

    options, attached = call.options, not call.options["detach"]
    container_id = states.check_id(call.arguments[0])
    open_missing_stdio()
    become_subreaper(options)
    choices = CriuOptions(**_folders(options))
    labels = Labels(options["lsm_profile"] or "", options["lsm_mount_context"] or "")

    def create_process(
        state: State, bundle: Bundle, create_options: CreateOptions
    ) -> ContainerProcess:
        return bring_back(state, bundle, create_options, choices, labels)

    def after(state: State, created: ContainerProcess) -> None:
        log.warnings(created.warnings)
        if attached and created.console_fd is not None:
            clear_onlcr(created.console_fd)
        pass_descriptors(options, created, not attached)

    root, bundle = states.root_of(call.globals["root"]), bundles.load(options["bundle"])
    state, created = bundles.make(
        root, container_id, bundle, cgroup_options(call), after, create_process
    )
    return attend_and_delete(state, created, log) if attached else 0


def _folders(options: dict[str, object]) -> dict[str, object]:
    """Return the options with `image_path` (default `checkpoint`) and `work_path` as absolute
    paths. An empty `work_path` stays empty."""
    work = options["work_path"]
    return {
        **options,
        "image_path": os.path.abspath(str(options["image_path"] or "checkpoint")),
        "work_path": os.path.abspath(str(work)) if work else "",
    }


def _descriptor(text: str | None) -> int | None:
    """Return the number of --status-fd, which our caller must have opened; None without the option.
    Raises InvalidArgument."""
    if not text:
        return None
    try:
        os.fstat(int(text))
    except (ValueError, OSError):
        raise InvalidArgument(f"--status-fd {text}: descriptor is not open") from None
    return int(text)
