"""The verb exec."""

from __future__ import annotations

import os

from pyrunc import debug
from pyrunc.cli.fd_passing import hand_out, open_missing_stdio, preserved
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel.process import kill_and_reap

try:
    from pyrunc.accelerate import exec_cache
except ImportError:  # that folder may be removed
    exec_cache = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.cli.log import Log
    from pyrunc.cli.parse import Call
    from pyrunc.container.exec import Executed
    from pyrunc.container.state import State
    from pyrunc.launch.model import Lowered
    from pyrunc.launch.run import ChildProcess


# A process object is whole: what a writer in Go leaves out, as it is empty or false, is not the
# container's.
NOT_INHERITED: dict[str, Any] = {"env": [], "noNewPrivileges": False}


def execute(call: Call, log: Log) -> int:
    """`exec ID COMMAND...` or `exec --process FILE ID`: with --detach 0, else the program's exit
    code."""
    options = call.options
    open_missing_stdio()
    found = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    _refuse_exec(status.status(found), options["ignore_paused"])
    pidfd = status.open_process(found)
    if pidfd is None:
        raise WrongState("cannot exec in a stopped container")
    document = _process_file(options["process"])
    key = None
    if exec_cache is not None:
        key = exec_cache.key(found, options, call.arguments[1:], document)
    executed = _again(found, pidfd, key, log) or _whole_way(call, found, pidfd, document, key, log)
    attached = not options["detach"]
    try:
        hand_out(options, executed, not attached or bool(options["console_socket"]))
    except BaseException:
        kill_and_reap(executed.pidfd)
        raise
    if not attached:
        return 0
    from pyrunc.container.run import attend

    return attend(executed.pidfd, None if options["console_socket"] else executed.console_fd)


def _process_file(path: str | None) -> bytes | None:
    """The content of --process, read once: it may be a pipe."""
    if not path:
        return None
    with open(path, "rb", buffering=0) as file:
        return file.readall() or b""


def _again(found: State, pidfd: int, key: bytes | None, log: Log) -> ChildProcess | None:
    if exec_cache is None or key is None:
        return None
    program = exec_cache.load(found, key)
    born = None if program is None else exec_cache.execute(found, pidfd, program)
    debug.say("exec by a kept program: %s", "no" if born is None else f"process {born.pid}")
    if program is not None and born is not None:
        for warning in program.warnings:
            log.warning(warning)
    return born


def _whole_way(
    call: Call, found: State, pidfd: int, asked_for: bytes | None, key: bytes | None, log: Log
) -> Executed:
    from pyrunc.cli.process import asked, from_file
    from pyrunc.compile.exec import ExecRequest, merged
    from pyrunc.compile.rootfs_probe import host_id, keeps_groups
    from pyrunc.container.exec import execute as enter
    from pyrunc.spec.check import check_process
    from pyrunc.spec.parse import parse

    options, document = call.options, found.config()
    spec = parse(document)
    if asked_for is None:
        wanted = asked(document.get("process") or {}, options, call.arguments[1:])
    else:
        wanted = {**NOT_INHERITED, **from_file(options["process"], asked_for)}
    process = merged(spec, wanted)
    check_process(process)
    if options["console_socket"] and not process.terminal:
        raise InvalidArgument("cannot use console socket if pyrunc will not detach or allocate tty")
    if process.terminal and options["detach"] and not options["console_socket"]:
        raise InvalidArgument(
            "cannot allocate tty if pyrunc will detach without setting console socket"
        )

    def keep(lowered: Lowered, warnings: tuple[str, ...]) -> None:
        user = spec.linux.namespace("user")
        if key is not None and (user is None or spec.linux.uid_mappings):
            exec_cache.store(
                found, key, lowered, host_id(process.user.uid, spec.linux.uid_mappings), warnings
            )

    group = _exec_cgroup(found, options["cgroup"])
    if group is not None:
        group.reach()
    if os.geteuid() != 0:
        from pyrunc.container.rootless import join

        spec = join(found.pid, spec)
    executed = enter(
        ExecRequest(
            found.pid,
            pidfd,
            spec,
            process,
            cgroup=group,
            preserve_fds=preserved(options["preserve_fds"]),
            keyring=found.keyring,
            id=found.id,
            bundle=found.bundle,
            keep_groups=keeps_groups(spec),
            attached=not options["detach"] and not options["console_socket"],
        ),
        keep,
    )
    for warning in executed.warnings:
        log.warning(warning)
    return executed


def _refuse_exec(current: str, ignore_paused: bool) -> None:
    if current in (status.STOPPED, status.CREATING):
        raise WrongState("cannot exec in a stopped container")
    if current == status.PAUSED and not ignore_paused:
        raise WrongState("cannot exec in a paused container (use --ignore-paused to override)")


def _exec_cgroup(found: State, below: str | None) -> Any:
    group = found.cgroup()
    if group is None or not below:
        return group
    from pyrunc.cgroups.group import Cgroup

    if ".." in below.split("/") or "\0" in below:
        raise InvalidArgument(f"bad sub cgroup path: {below}")
    return Cgroup(
        f"{group.path}/{below.strip('/')}".rstrip("/"), group.driver, group.slice, group.unit
    )
