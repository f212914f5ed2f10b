"""Rehearses commands: runs them on a container that exists only as a state file, before the
snapshot of the interpreter is taken.

The snapshot then contains what a first run computes: code that CPython has specialised for the
types in use (PEP 659), CPython's cache of attributes, and tables in modules. Otherwise each command
would repeat this work, and copy the pages of the snapshot to which it writes. No process of a
container is started. At the end, all variables of the modules are restored.
"""

from __future__ import annotations

import io
import marshal
import os
import sys

from pyrunc import jsontext
from pyrunc.cli.fast import run
from pyrunc.compile.container import compile_container
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.container import state as states
from pyrunc.container.bundle import CreateOptions, create_request, load, make
from pyrunc.container.process import ContainerProcess
from pyrunc.errors import Error
from pyrunc.kernel.fd import short_path
from pyrunc.kernel.process import alive_since
from pyrunc.plan.build import build
from pyrunc.plan.lower import lower
from pyrunc.plan.model import HostFacts, RootfsFacts
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pyrunc.container.bundle import Bundle

ROUNDS = 10  # a function's code is specialised from its eighth call on
NAME = "rehearsal"
HOST = HostFacts((1 << 41) - 1, 40)
START_TIMEOUT_S = 5
NO_GROUP = {"path": f"/{NAME}", "driver": "cgroupfs"}


def rehearse(folder: str) -> list[int]:
    """Plan a container, and run `state` and `delete` on it a few times, so that the snapshot
    contains what first runs compute. Returns the exit codes of the commands. `folder` is made for
    the files, and removed.

    Stops early, without an error, if no container can be made. This is so for an ordinary user,
    whose containers need a user namespace, and for the installation of a package in a chroot
    without /proc.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("pyrunc.")]
    before = [
        (vars(module), name, value) for module in modules for name, value in vars(module).items()
    ]
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    _use_marshal()
    states.remove(folder)
    codes: list[int] = []
    try:
        # With both loops, the processor time of `state` falls to 0.83, of `delete` to 0.86, of
        # `create` to 0.95.
        for _ in range(ROUNDS):
            _plan()
        for _ in range(ROUNDS):
            codes += _round(folder)
    except Exception:  # for example /proc/self/stat has 44 fields under qemu-user
        pass  # the snapshot works without a rehearsal; the command itself will report the fault
    finally:
        sys.stdout, sys.stderr = streams
        # Through the dict, because getattr would push everything else out of the attribute cache.
        for names, name, value in before:
            if names[name] is not value:
                names[name] = value
        states.remove(folder)
    return codes


def run_once(
    folder: str,
    watch: Callable[[int], object],
    resume: Callable[[list[str], dict[bytes, bytes], int], object],
) -> None:
    """Make a container as `rehearse` does, and run `state`, `start` and `delete` on it, each in a
    child process. The commands read and write real JSON, while `rehearse` uses marshal. The
    files are in `folder`, which is made and removed. An error in a child process ends that process
    only. Raises OSError.

    Each child process first calls `watch(phase)`, which may begin to record its writes to memory.
    The phase is 2 for the process that makes the container, 1 for the others. `resume`: the
    function of snapshot.py with which a command begins.
    """
    root, pid = f"{folder}/root", os.getpid()

    def make_container() -> None:
        watch(2)
        state = _make_container(folder)
        state.save(cgroup=NO_GROUP, pid=pid, start_time=alive_since(pid) or 0)

    def command(verb: str) -> None:
        watch(1)
        resume(["pyrunc", "--root", root, verb, NAME], {}, 0)

    def delete() -> None:
        states.find(root, NAME).save(cgroup=None, pid=0)
        command("delete")

    states.remove(folder)
    try:
        os.waitpid(_fork(make_container), 0)
        os.waitpid(_fork(lambda: command("state")), 0)
        _wait_for_start(f"{root}/{NAME}", lambda: _fork(lambda: command("start")))
        os.waitpid(_fork(delete), 0)
    finally:
        states.remove(folder)


def _fork(work: Callable[[], object]) -> int:
    """Call `work` in a child process whose standard streams are /dev/null. Returns the pid."""
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            work()
        finally:
            os._exit(0)
    return pid


def _wait_for_start(folder: str, start: Callable[[], int]) -> None:
    """Play the container's process for one `start` command: listen on the start socket in `folder`,
    read the command's byte, and wait until the command has ended. The function `start` starts the
    command and returns its pid."""
    from socket import AF_UNIX, socket  # not in the snapshot

    with socket(AF_UNIX) as waiting:
        with short_path(folder) as short:
            waiting.bind(f"{short}/{states.START_SOCKET}")
        waiting.listen(1)
        waiting.settimeout(START_TIMEOUT_S)
        pid = start()
        connection, _ = waiting.accept()
    with connection:
        connection.recv(1)
    os.waitpid(pid, 0)


def _use_marshal() -> None:
    """Make `jsontext` use marshal while commands are rehearsed. The C module of JSON is a shared
    object, which cannot be in the snapshot."""

    def scan(text: str, start: int) -> tuple[Any, int]:
        return marshal.loads(bytes.fromhex(text)), len(text)

    def encode(value: Any, depth: int) -> tuple[str]:
        return (marshal.dumps(value).hex(),)

    jsontext._halves = scan, encode


def _plan() -> None:
    spec = parse(default())
    check(spec)
    lower(build(spec, HOST, RootfsFacts()))


def _make_container(folder: str) -> states.State:
    """Make a container that has no process, with its bundle and its state in `folder`. The bundle
    must not exist yet."""
    os.makedirs(f"{folder}/bundle/rootfs")
    with open(f"{folder}/bundle/{states.CONFIG}", "w") as file:
        file.write(jsontext.dumps(_configuration()))
    bundle = load(f"{folder}/bundle")
    options = CreateOptions(with_cgroup=False)
    return make(f"{folder}/root", NAME, bundle, options, lambda *_: None, _this_process)[0]


def _round(folder: str) -> list[int]:
    root = f"{folder}/root"
    state = _make_container(folder)
    state.save(cgroup=NO_GROUP)
    codes = [run(["--root", root, "state", NAME])]
    state.save(cgroup=None, pid=0)
    codes.append(run(["--root", root, "delete", NAME]))
    states.remove(folder)
    return codes


def _configuration() -> dict[str, Any]:
    config = default()
    config["process"]["terminal"] = False  # a terminal would need a socket
    return config


def _this_process(state: states.State, bundle: Bundle, options: CreateOptions) -> ContainerProcess:
    """Replace `create`: make no process, but store this process in the state as the container's
    init, and return it. First compile the container's launch without running it. Errors of
    compiling are ignored, because this process may lack the rights for it."""
    try:
        with Undo() as undo, NamedDescriptors() as descriptors:
            compile_container(create_request(state, bundle, options), descriptors, undo)
    except (Error, OSError):
        # The container's root is mounted detached, which may be refused while a package is
        # installed.
        pass
    state.save(pid=os.getpid(), start_time=alive_since(os.getpid()) or 0)
    return ContainerProcess(state.pid, -1, state.start_time, None)
