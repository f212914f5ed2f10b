"""The verbs of a container's life: create, start, run, state, kill, delete."""

from __future__ import annotations

import os

from pyrunc import atomic_file, jsontext
from pyrunc.cli.fd_passing import (
    activated,
    check_terminal,
    open_missing_stdio,
    pass_descriptors,
    preserved,
)
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import Error, InvalidArgument, InvalidSpec, NotFound, WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.cli.log import CommandLog
    from pyrunc.cli.parse import CommandLine
    from pyrunc.container.bundle import CreateOptions
    from pyrunc.container.notify import NotifyProxy
    from pyrunc.container.process import ContainerProcess
    from pyrunc.container.state import State
    from pyrunc.plan.model import Plan

SIGTERM = 15


def create(call: CommandLine, log: CommandLog) -> int:
    """Run `create --bundle DIR ID`. Prints nothing, because stdout belongs to the container."""
    _make(call, log, _create_options(call, start_immediately=False))
    return 0


def run(call: CommandLine, log: CommandLog) -> int:
    """Run `run --bundle DIR ID`; returns 0 with --detach, else the exit code of the container's
    command."""
    attached = not call.options["detach"]
    become_subreaper(call.options)
    if attached:
        from pyrunc.container.run import hold_signals

        hold_signals()
    create_options = _create_options(call, start_immediately=True, attached=attached)
    state, created = _make(call, log, create_options)
    _poststart(state, state.config(), log)
    if created.proxy is not None:
        _await_ready(created.proxy, created, attached, log)
    return attend_and_delete(state, created, log, call.options["keep"]) if attached else 0


def become_subreaper(options: dict[str, Any]) -> None:
    """Make this process, instead of the machine's init, the parent that reaps the container's
    orphans. Does nothing with --detach or --no-subreaper."""
    if not (options["detach"] or options["no_subreaper"]):
        from pyrunc.kernel.reaper import set_child_subreaper

        set_child_subreaper()


def attend_and_delete(
    state: State, created: ContainerProcess, log: CommandLog, keep: bool = False
) -> int:
    """Wait for the end of an attached container; delete the container unless `keep`. Returns the
    exit code of the container's command."""
    from pyrunc.container.delete import delete as remove
    from pyrunc.container.run import attend

    try:
        return attend(created.pid, created.pidfd, created.console_fd)
    finally:
        if not keep:
            try:
                log.warnings(remove(state, force=True))
            except NotFound:
                pass  # another command has deleted it


def _await_ready(
    proxy: NotifyProxy, created: ContainerProcess, attached: bool, log: CommandLog
) -> None:
    """Wait until the container sends READY, and report that to the service manager. MAINPID is the
    container's pid.

    With `attached`, a background thread waits. Its errors become warnings, and MAINPID is our own
    pid.
    """
    if not attached:
        proxy.wait(created.pidfd, created.pid)
        return

    def wait() -> None:
        try:
            proxy.wait(created.pidfd, os.getpid())
        except Error as error:
            log.warning(error.message)

    from _thread import start_new_thread

    # Without the module `threading`, because its import would slow down every run. Nothing
    # waits for the end of the thread.
    start_new_thread(wait, ())


def _make(
    call: CommandLine, log: CommandLog, create_options: CreateOptions
) -> tuple[State, ContainerProcess]:
    from pyrunc.container import bundle as bundles

    options = call.options
    container_id = states.check_id(call.arguments[0])
    # Before anything is opened: a file of ours on number 0, 1 or 2 would be the container's stdio.
    open_missing_stdio()
    bundle = bundles.load(options["bundle"], options["config"] or "")
    detached = options.get("detach", True)  # `create` has no such option
    check_terminal(bundle.spec.process, options["console_socket"], detached)

    def after(state: State, created: ContainerProcess) -> None:
        log.warnings(created.warnings)
        # Within `make`: an engine whose socket does not answer gets an error, and the container is
        # undone.
        pass_descriptors(options, created, detached)

    return bundles.make(
        states.root_of(call.globals["root"]), container_id, bundle, create_options, after
    )


def _create_options(
    call: CommandLine, start_immediately: bool, attached: bool = False
) -> CreateOptions:
    return cgroup_options(call).replace(
        keyring=not call.options["no_new_keyring"],
        preserve_fds=preserved(call.options["preserve_fds"] + activated()),
        start_immediately=start_immediately,
        pivot=not call.options["no_pivot"],
        notify=os.environ.get("NOTIFY_SOCKET", ""),
        activated=activated(),
        trace=_tracer(call.options["trace"]),
        attached=attached,
    )


def cgroup_options(call: CommandLine) -> CreateOptions:
    """Return the CreateOptions that the options before the verb set: the cgroup's driver, whether
    to make a cgroup, and whether a missing controller is an error. Raises InvalidArgument for an
    unknown --cgroup-manager."""
    from pyrunc.container.bundle import CreateOptions

    manager = call.globals["cgroup_manager"]
    if manager not in ("cgroupfs", "systemd", "disabled"):
        raise InvalidArgument(
            f"--cgroup-manager {manager!r} is not one of cgroupfs, systemd, disabled"
        )
    by_systemd = call.globals["systemd_cgroup"] or manager == "systemd"
    return CreateOptions(
        driver="systemd" if by_systemd else "cgroupfs",
        with_cgroup=manager != "disabled",
        missing_controllers=call.globals["missing_controllers"],
    )


def _tracer(path: str | None) -> Callable[[Plan, int, Sequence[tuple[str, int]]], None] | None:
    """Return a function that writes to `path` how long each operation of the plan took, for
    --trace. None without a path."""
    if not path:
        return None
    from pyrunc.plan.show import trace

    def write(plan: Plan, started_ns: int, times: Sequence[tuple[str, int]]) -> None:
        atomic_file.write_bytes(
            os.path.abspath(path), trace(plan, started_ns, times).encode(), mode=0o644
        )

    return write


def start(call: CommandLine, log: CommandLog) -> int:
    """Run `start ID`."""
    from pyrunc.container.start import release

    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    with states.Lock(state) as state:
        # Under the lock: two starts at once would both find the container created.
        _refuse_start(status.status(state, locked=True))
        config = state.config()
        process = config.get("process")
        if process is None:
            raise InvalidSpec("process", "process property must not be empty")
        # Before the release: the container may report at once that it is ready, and without a
        # socket this message would be lost.
        await_ready = _ready_waiter(state)
        release(state.folder, process.get("args") or [""], process.get("env") or ())
    _poststart(state, config, log)
    if await_ready is not None:
        await_ready()
    return 0


def _ready_waiter(state: State) -> Callable[[], object] | None:
    """Return a function that waits until the container sends READY. None without NOTIFY_SOCKET,
    without the folder that `create` makes for the container's socket, or when init has ended."""
    manager = os.environ.get("NOTIFY_SOCKET", "")
    if not manager or not os.path.isdir(f"{state.folder}/notify"):
        return None
    from pyrunc.container.notify import NotifyProxy

    pidfd = status.open_process(state)
    if pidfd is None:
        return None
    proxy = NotifyProxy(state.folder, manager)
    return lambda: proxy.wait(pidfd, state.pid)


def _refuse_start(current: str) -> None:
    refusals = {
        status.STOPPED: "cannot start a container that has stopped",
        status.RUNNING: "cannot start an already running container",
        status.PAUSED: "cannot start a container in the paused state",
        status.CREATING: "cannot start a container that is being created",
    }
    if current in refusals:
        raise WrongState(refusals[current])


def _poststart(state: State, config: dict[str, Any], log: CommandLog) -> None:
    """Run the poststart hooks, after the container's command was executed. When a hook fails,
    destroy the container and raise the hook's error (runtime-spec 1.3)."""
    if not (config.get("hooks") or {}).get("poststart"):
        return
    from pyrunc.container.delete import destroy
    from pyrunc.launch import hooks as programs
    from pyrunc.spec.parse import parse

    try:
        # runtime-spec, "poststart": after the command was executed, before `start` returns.
        programs.run(
            parse(config).hooks.poststart, "poststart", status.oci_state(state, status.RUNNING)
        )
    except Error:
        log.warnings(destroy(state))
        raise


def state(call: CommandLine, log: CommandLog) -> int:
    """Run `state ID`, which prints a JSON object."""
    container = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    print(_indented(status.report(container)))
    return 0


def _indented(document: dict[str, Any], depth: int = 1) -> str:
    """Format JSON with one field per line, for people and for scripts that search the lines."""
    space = "  " * depth
    lines = [
        f"{space}{jsontext.dumps(key)}: "
        + (_indented(value, depth + 1) if isinstance(value, dict) else jsontext.dumps(value))
        for key, value in document.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n" + space[2:] + "}"


def kill(call: CommandLine, log: CommandLog) -> int:
    """Run `kill ID [SIGNAL]`; the default is TERM."""
    from pyrunc.container import kill as signals

    signal = call.arguments[1] if len(call.arguments) > 1 else ""
    number = signals.parse_signal(signal) if signal else SIGTERM
    root = states.root_of(call.globals["root"])
    for name in _selected_ids(call, root):
        signals.kill(states.find(root, name), number, call.options["all"])
    return 0


def _selected_ids(call: CommandLine, root: str) -> list[str]:
    """Return the container's id. With --regex, return the ids of all containers that the expression
    matches, as crun does."""
    if not call.options["regex"]:
        return [states.check_id(call.arguments[0])]
    import re

    try:
        expression = re.compile(call.arguments[0])
    except re.error as error:
        raise InvalidArgument(f"--regex {call.arguments[0]!r}: {error}") from None
    return [name for name in states.ids(root) if expression.search(name)]


def delete(call: CommandLine, log: CommandLog) -> int:
    """Run `delete [--force] ID`."""
    from pyrunc.container.delete import delete as remove

    root, force = states.root_of(call.globals["root"]), call.options["force"]
    for name in _selected_ids(call, root):
        try:
            log.warnings(remove(states.find(root, name), force))
        except NotFound:
            if not force:
                raise
    return 0
