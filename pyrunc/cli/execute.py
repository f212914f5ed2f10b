"""The verb `exec`."""

from __future__ import annotations

import os

from pyrunc import debug
from pyrunc.cli.fd_passing import check_terminal, open_missing_stdio, pass_descriptors, preserved
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel.fd import read_file
from pyrunc.kernel.process import kill_and_reap

try:
    from pyrunc.accelerate import exec_cache
except ImportError:  # the folder may be removed
    exec_cache = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.cli.log import CommandLog
    from pyrunc.cli.parse import CommandLine
    from pyrunc.container.process import ContainerProcess
    from pyrunc.container.state import State
    from pyrunc.launch.run import ChildProcess
    from pyrunc.program.model import LoweredProgram


# The process object of --process is complete. Go omits empty and false fields, so a missing field
# is not taken from the container's process.
NOT_INHERITED: dict[str, Any] = {"env": [], "noNewPrivileges": False}


def execute(call: CommandLine, log: CommandLog) -> int:
    """Run `exec ID COMMAND...` or `exec --process FILE ID`; returns 0 with --detach, else the
    command's exit code."""
    options = call.options
    open_missing_stdio()
    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    _refuse_exec(status.status(state), options["ignore_paused"])
    pidfd = status.open_process(state)
    if pidfd is None:
        raise WrongState("cannot exec in a stopped container")
    # Read once, because it may be a pipe.
    document = read_file(options["process"]) if options["process"] else None
    key = None
    if exec_cache is not None:
        # An exec takes 15 ms of processor time with a stored program, and 21 without.
        key = exec_cache.key(state, options, call.arguments[1:], document)
    executed = _run_stored_program(state, pidfd, key, log)
    if executed is None:
        executed = _compile_and_exec(call, state, pidfd, document, key, log)
    attached = not options["detach"]
    try:
        pass_descriptors(options, executed, not attached or bool(options["console_socket"]))
    except BaseException:
        # The caller gets an error and no pid, so the process must not be left.
        kill_and_reap(executed.pidfd)
        raise
    if not attached:
        return 0
    from pyrunc.container.run import attend

    console_fd = None if options["console_socket"] else executed.console_fd
    return attend(executed.pid, executed.pidfd, console_fd)


def _run_stored_program(
    state: State, pidfd: int, key: bytes | None, log: CommandLog
) -> ChildProcess | ContainerProcess | None:
    if exec_cache is None or key is None:
        return None
    program = exec_cache.load(state, key)
    process = None if program is None else exec_cache.execute(state, pidfd, program)
    outcome = "no" if process is None else f"process {process.pid}"
    debug.say("exec by a stored program: %s", outcome)
    if program is not None and process is not None:
        log.warnings(program.warnings)
    return process


def _compile_and_exec(
    call: CommandLine,
    state: State,
    pidfd: int,
    process_json: bytes | None,
    key: bytes | None,
    log: CommandLog,
) -> ContainerProcess:
    from pyrunc.cli.process import process_from_file, process_from_options
    from pyrunc.compile.exec import ExecRequest, merged
    from pyrunc.compile.rootfs_probe import host_id, keeps_groups
    from pyrunc.container.exec import execute as enter
    from pyrunc.spec.check import check_process
    from pyrunc.spec.parse import parse

    options, config = call.options, state.config()
    spec = parse(config)
    if process_json is None:
        document = process_from_options(config.get("process") or {}, options, call.arguments[1:])
    else:
        document = {**NOT_INHERITED, **process_from_file(options["process"], process_json)}
    process = merged(spec, document)
    check_process(process)
    detached = options["detach"] or bool(options["console_socket"])
    check_terminal(process, options["console_socket"], detached)

    def store(lowered: LoweredProgram, warnings: tuple[str, ...]) -> None:
        user = spec.linux.namespace("user")
        # For a user namespace with a path, the configuration has no maps, so the stored owner of
        # stdio would be a guess.
        if key is not None and (user is None or spec.linux.uid_mappings):
            owner = host_id(process.user.uid, spec.linux.uid_mappings)
            exec_cache.store(state, key, lowered, owner, warnings)

    group = _exec_cgroup(state, options["cgroup"])
    if group is not None:
        group.reach()
    if os.geteuid() != 0:
        from pyrunc.container.rootless import join

        spec = join(state.pid, spec)
    executed = enter(
        ExecRequest(
            state.pid,
            pidfd,
            spec,
            process,
            cgroup=group,
            follow=not options["cgroup"],
            preserve_fds=preserved(options["preserve_fds"]),
            keyring=state.keyring,
            id=state.id,
            bundle=state.bundle,
            keep_groups=keeps_groups(spec),
            attached=not detached,
        ),
        store,
    )
    log.warnings(executed.warnings)
    return executed


def _refuse_exec(current: str, ignore_paused: bool) -> None:
    if current in (status.STOPPED, status.CREATING):
        raise WrongState("cannot exec in a stopped container")
    if current == status.PAUSED and not ignore_paused:
        raise WrongState("cannot exec in a paused container (use --ignore-paused to override)")


def _exec_cgroup(state: State, below: str | None) -> Any:
    group = state.group()
    if group is None or not below:
        return group
    from pyrunc.cgroups.group import Cgroup

    # Only below the container's own group, where its limits hold.
    if ".." in below.split("/") or "\0" in below:
        raise InvalidArgument(f"bad sub cgroup path: {below}")
    return Cgroup(
        f"{group.path}/{below.strip('/')}".rstrip("/"), group.driver, group.slice, group.unit
    )
