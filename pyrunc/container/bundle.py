"""Makes a container from a bundle, for `create`, `run` and `restore`: its state on disk, then its
process.

The state is written before anything else is made. It is written again when the process exists, so
that `delete` finds all that a killed create has left. A create that fails undoes all that it did.
"""

from __future__ import annotations

import os

from pyrunc import debug, jsontext
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.container.state import State
from pyrunc.errors import InvalidSpec, NotFound
from pyrunc.kernel.credential import outer_uid
from pyrunc.kernel.fd import read_file, stream_name
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.compile.container import CreateRequest
    from pyrunc.container.process import ContainerProcess
    from pyrunc.plan.model import Plan
    from pyrunc.spec.model import Hooks, Spec


class Bundle(Value):
    """A bundle's configuration, read and checked. `folder` is the bundle's absolute path."""

    folder: str
    document: dict[str, Any]
    spec: Spec


def load(folder: str, config: str = "") -> Bundle:
    """Read and check the configuration of the bundle in `folder`. `config`: the path of the file;
    empty for `config.json` in the bundle. Raises NotFound, InvalidSpec."""
    from pyrunc.spec.check import check
    from pyrunc.spec.parse import parse

    path = config or os.path.join(folder, states.CONFIG)
    try:
        text = read_file(path)
    except FileNotFoundError:
        raise NotFound(f"JSON specification file {path} not found") from None
    try:
        document = jsontext.loads(text)
    except ValueError as error:
        raise InvalidSpec("", f"{path} is not JSON: {error}") from None
    spec = parse(document)
    check(spec)
    if spec.root is not None and _strip_root(document, spec, folder):
        spec = parse(document)
    debug.say("read %s: %d bytes, version %s", path, len(text), spec.version)
    return Bundle(os.path.abspath(folder), document, spec)


def _strip_root(document: dict[str, Any], spec: Spec, folder: str) -> bool:
    """Remove the path of the container's root directory from the beginning of mount destinations,
    as runc does. The configuration `document`, which other commands read later, is changed. Returns
    whether any destination has changed. `folder`: the bundle."""
    assert spec.root is not None
    root = os.path.abspath(os.path.join(folder, spec.root.path))
    changed = False
    for mount, entry in zip(spec.mounts, document.get("mounts") or (), strict=True):
        path = os.path.normpath(mount.destination)
        if path.startswith(root + "/"):
            entry["destination"] = path[len(root) :]
            changed = True
    return changed


class CreateOptions(Value):
    """Options of `create` besides the bundle, most of them from the command line.

    - `driver`, `missing_controllers`: see `CgroupChoice`
    - `with_cgroup`: make a cgroup. False: stay in the caller's cgroup.
    - `keyring`: make a session keyring for the container
    - `preserve_fds`: our descriptors that become 3, 4, … in the container
    - `start_immediately`: execute the container's command. False: wait for `start`.
    - `pivot`: use pivot_root(2). False: mount the root over the host's root
    - `notify`: the socket of a service manager that waits for the container to be ready
    - `trace`: see `CreateRequest`
    - `attached`: the runtime stays and copies the container's terminal to its own
    - `activated`: how many of `preserve_fds` are sockets for systemd's socket activation
    """

    driver: str = "cgroupfs"
    with_cgroup: bool = True
    missing_controllers: str = "error"
    keyring: bool = True
    preserve_fds: tuple[int, ...] = ()
    start_immediately: bool = False
    pivot: bool = True
    notify: str = ""
    trace: Callable[[Plan, int, Sequence[tuple[str, int]]], object] | None = None
    attached: bool = False
    activated: int = 0


def make(
    root: str,
    container_id: str,
    bundle: Bundle,
    create_options: CreateOptions,
    after: Callable[[State, ContainerProcess], None],
    create_process: Callable[[State, Bundle, CreateOptions], ContainerProcess] | None = None,
) -> tuple[State, ContainerProcess]:
    """Claim the id, create the process, save it in the state, then call `after`. If any of this
    fails, undo everything and, if the id was claimed, run the poststop hooks.

    `create_process` makes the process; the default is `create`. Raises:

    - AlreadyExists
    - the errors of `create_process` and `after`
    - for an ordinary user, the errors of `rootless.enter`
    - InvalidSpec for limits, or a cgroup path, if the runtime may not make cgroups
    """
    # Read now: after `enter` we are root of another namespace.
    owner_uid = outer_uid()
    if os.geteuid() != 0:
        from pyrunc.container.rootless import enter

        bundle = bundle.replace(spec=enter(bundle.spec))
    if create_options.with_cgroup and not _may_have_cgroup(
        container_id, bundle.spec, create_options.driver
    ):
        create_options = create_options.replace(with_cgroup=False)
    # After these checks: the undo begins below, so a check that failed later would leave the folder
    # behind.
    folder = states.claim(root, container_id)
    state = _first_record(folder, container_id, bundle, create_options, owner_uid)
    debug.say("state of container %s is in %s", container_id, folder)
    try:
        with Undo() as undo:
            undo.push("state folder", states.remove, folder)
            # A container whose lock is held is "creating"; one that is incomplete without a lock
            # was left by a killed create.
            with states.Lock(state):
                state.store_config(bundle.document)
                state.save()
                created = (create_process or _create)(state, bundle, create_options)
                undo.push("container", _unmake, state, created)
                group = created.cgroup
                # Saved before `after`, which may start the command: if the runtime is killed there,
                # every command still finds the container's process.
                state.save(cgroup=group.record() if group is not None else None, complete=True)
                after(state, created)
            undo.commit()
    except BaseException:
        _run_poststop(state, bundle.spec.hooks)
        raise
    return state, created


def _create(state: State, bundle: Bundle, create_options: CreateOptions) -> ContainerProcess:
    from pyrunc.container.create import create

    bundle = bundle.replace(spec=_with_sockets(bundle.spec, create_options.activated))
    proxy = None
    if create_options.notify and bundle.spec.process is not None:
        from pyrunc.container import notify

        bundle = bundle.replace(spec=notify.with_socket(bundle.spec, state.folder))
        if create_options.start_immediately:
            proxy = notify.NotifyProxy(state.folder, create_options.notify)
    created = create(create_request(state, bundle, create_options))
    return created.replace(proxy=proxy)


def _may_have_cgroup(container_id: str, spec: Spec, driver: str) -> bool:
    """Return whether the container gets its own cgroup. False if the runtime may not make cgroups,
    as is usual for root of a user namespace. In that case a cgroup path or limits in the
    specification raise InvalidSpec."""
    from pyrunc.cgroups.naming import place

    group = place(spec.linux.cgroups_path, container_id, driver)
    if driver == "systemd" or group.may_be_made():
        return True
    limits = {
        key for key, value in (spec.linux.resources or {}).items() if value and key != "devices"
    }
    if spec.linux.cgroups_path or limits:
        raise InvalidSpec(
            "linux.cgroupsPath",
            # The text is runc's.
            "rootless needs no limits + no cgrouppath when no permission is granted for cgroups",
        )
    return False


def _first_record(
    folder: str, container_id: str, bundle: Bundle, create_options: CreateOptions, owner_uid: int
) -> State:
    from pyrunc.compile.requests import keyring_name

    spec = bundle.spec
    root = os.path.join(bundle.folder, spec.root.path if spec.root else "")
    return State.of_spec(container_id, folder, bundle.folder, spec).replace(
        rootfs=os.path.normpath(root),
        owner_uid=owner_uid,
        cgroup=_expected_cgroup(container_id, spec, create_options),
        keyring=keyring_name(container_id) if create_options.keyring else "",
        streams=_streams(spec),
    )


def _streams(spec: Spec) -> list[str]:
    """Return the names of this process's descriptors 0 to 2, which become the container's standard
    streams; empty names if the container has a terminal."""
    if spec.process is not None and spec.process.terminal:
        return [""] * 3
    return [stream_name(number) for number in range(3)]


def _expected_cgroup(
    container_id: str, spec: Spec, create_options: CreateOptions
) -> dict[str, str] | None:
    if not create_options.with_cgroup:
        return None
    from pyrunc.cgroups.naming import place

    return place(spec.linux.cgroups_path, container_id, create_options.driver).record()


def create_request(state: State, bundle: Bundle, create_options: CreateOptions) -> CreateRequest:
    """Build the request that `create` needs to make the bundle's container."""
    from pyrunc.compile.container import CreateRequest
    from pyrunc.compile.requests import CgroupChoice
    from pyrunc.compile.rootfs_probe import keeps_groups
    from pyrunc.compile.sources import Directory

    spec = bundle.spec
    assert spec.root is not None
    return CreateRequest(
        state.id,
        bundle.folder,
        spec,
        Directory(spec.root.path),
        state_dir=state.folder,
        cgroup=CgroupChoice(create_options.driver, create_options.missing_controllers)
        if create_options.with_cgroup
        else None,
        start_immediately=create_options.start_immediately,
        record=lambda process: state.save(pid=process.pid, start_time=process.start_time),
        attached=create_options.attached,
        preserve_fds=create_options.preserve_fds,
        keyring=create_options.keyring,
        pivot=create_options.pivot,
        keep_groups=keeps_groups(spec),
        trace=create_options.trace,
    )


def _with_sockets(spec: Spec, count: int) -> Spec:
    """Return the specification with the variables of systemd's socket activation
    (sd_listen_fds(3)): LISTEN_FDS is `count`, LISTEN_PID is 1, the pid of the container's process
    in the container."""
    if not count or spec.process is None:
        return spec
    # sd_listen_fds(3) ignores the descriptors unless LISTEN_PID is the reader's own pid.
    env = (*spec.process.env, f"LISTEN_FDS={count}", "LISTEN_PID=1")
    return spec.replace(process=spec.process.replace(env=env))


def _unmake(state: State, created: ContainerProcess) -> None:
    """Kill and reap the process, and remove its cgroup."""
    from pyrunc.container.delete import leave_rdt

    # Kill init first: if the container has no separate cgroup, only init's pidfd can kill it.
    if status.signal(state, 9):
        status.wait_dead(state, 10.0)
    try:
        os.waitid(os.P_PIDFD, created.pidfd, os.WEXITED)
    except ChildProcessError:
        pass
    if created.cgroup is not None:
        created.cgroup.kill()
        created.cgroup.remove()
    leave_rdt(state)


def _run_poststop(state: State, hooks: Hooks) -> None:
    # runtime-spec, runtime.md, "Lifecycle": a failed create goes on with the steps of delete, and
    # poststop is one of them.
    if hooks.poststop:
        from pyrunc.launch import hooks as programs

        programs.run_all(hooks.poststop, "poststop", status.oci_state(state, status.STOPPED))
