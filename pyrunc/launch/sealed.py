"""A launch on its way to the process that carries it out: one message of `pyrunc.ipc`, a JSON object and descriptors.

`fields` are the launch's own, with the parent's steps as objects; the descriptors are the program's image, its words, then the
plan's by name, and the end of a pipe that keeps a systemd scope alive until the process is in it. Both ends are forks of our
zygotes, perhaps of two versions of us: a message of another `VERSION` is refused.
"""

from __future__ import annotations

import os

from pyrunc import ipc
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import ResourceExhausted, Unsupported
from pyrunc.kernel import fd as _fd
from pyrunc.launch.model import Launch
from pyrunc.program.received import ReceivedProgram, words_of
from pyrunc.records import Record
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.plan.model import Step

VERSION = 1
MOST_DESCRIPTORS = ipc.MOST_FDS - 4
"""Of the plan, beside the program, its words and the scope's; one is left for a message that travels in a memfd."""
PLAIN = ("args", "stdio_owner", "own_nulls", "id", "bundle", "oci_version", "status", "container_pid")


class SealedLaunch(Record):
    """The message. `numbers`: of the descriptors that the program uses, by name; `steps`: of the parent, by the number of the plan's
    line; `placeholder`: the last descriptor keeps a systemd scope."""

    version: int
    args: Sequence[str]
    stdio_owner: int | None
    own_nulls: bool
    id: str
    bundle: str
    oci_version: str
    status: str
    container_pid: int
    pid_op: int | None
    numbers: dict[str, int]
    steps: dict[str, Any]
    descriptors: Sequence[str]
    pinned: dict[str, str]
    annotations: dict[str, str]
    cgroup: dict[str, str] | None
    placeholder: bool

    @classmethod
    def read(cls, message: Message) -> SealedLaunch:
        """Raises Unsupported for another version, InvalidArgument."""
        if message.get("version") != VERSION:
            raise Unsupported(
                f"a launch of version {message.get('version')!r}, we take {VERSION}: we are of different versions"
            )
        return cls.of(message)


def seal(launch: Launch) -> tuple[Message, list[int]]:
    """The message. The descriptors are new ones, the caller's to close; the cgroup's placeholder, if it has one, goes with them.

    Raises ResourceExhausted for a launch of too many descriptors.
    """
    program = launch.lowered.program
    names = [
        name for name in launch.descriptors if name in launch.lowered.numbers or name.startswith("hook-")
    ]
    if len(names) > MOST_DESCRIPTORS:
        raise ResourceExhausted(
            f"{len(names)} mounts and namespaces, of which {MOST_DESCRIPTORS} fit a message"
        )
    fds = [_fd.open_memfd("pyrunc:program", program.encode())]
    try:
        _fd.add_seals(fds[0], _fd.UNCHANGED)
        fds.append(ipc.open_memory("pyrunc:words", words_of(program)))
        fds += [os.dup(launch.descriptors[name]) for name in names]
        placeholder = launch.cgroup.release_placeholder() if launch.cgroup else None
        if placeholder is not None:
            fds.append(placeholder)
    except BaseException:
        ipc.close_all(fds)
        raise
    steps = {str(line): [plain(step) for step in steps] for line, steps in launch.lowered.steps.items()}
    sealed = SealedLaunch(
        version=VERSION,
        **{name: getattr(launch, name) for name in PLAIN},
        pid_op=program.pid_op,
        numbers=dict(launch.lowered.numbers),
        steps=steps,
        descriptors=names,
        pinned=dict(launch.pinned),
        annotations=dict(launch.annotations),
        cgroup=launch.cgroup.record() if launch.cgroup else None,
        placeholder=placeholder is not None,
    )
    return sealed.to_fields(), fds


class OpenedLaunch:
    """A launch that was received, with its descriptors, which it owns until `close`."""

    __slots__ = ("_fds", "launch")

    def __init__(self, message: Message, fds: Sequence[int]) -> None:
        """Owns `fds` from here on, also when it raises Unsupported (another version)."""
        self._fds = list(fds)
        try:
            self.launch = _opened(SealedLaunch.read(message), self._fds)
        except BaseException:
            ipc.close_all(self._fds)
            raise

    def close(self) -> None:
        """The process runs, or never will."""
        if self.launch.cgroup is not None:
            self.launch.cgroup.occupied()
        ipc.close_all(self._fds)
        self._fds = []


class _Lowered:
    __slots__ = ("numbers", "program", "steps")

    def __init__(self, program: Any, numbers: Mapping[str, int], steps: Mapping[int, Sequence[Step]]) -> None:
        self.program, self.numbers, self.steps = program, numbers, steps


def _opened(sealed: SealedLaunch, fds: list[int]) -> Launch:
    cgroup = None
    if sealed.cgroup:
        cgroup = Cgroup.from_record(sealed.cgroup)
        if sealed.placeholder:
            cgroup.take_placeholder(fds.pop())
    steps = {int(line): tuple(map(value_of, found)) for line, found in sealed.steps.items()}
    return Launch(
        _Lowered(ReceivedProgram(fds[0], fds[1], sealed.pid_op), sealed.numbers, steps),
        dict(zip(sealed.descriptors, fds[2:], strict=True)),
        (),
        pinned=sealed.pinned,
        annotations=sealed.annotations,
        cgroup=cgroup,
        **{name: getattr(sealed, name) for name in PLAIN},
    )


def cgroup_of(message: Message) -> Cgroup | None:
    """Where the process of a sealed launch is to live. Raises Unsupported (another version)."""
    record = SealedLaunch.read(message).cgroup
    return Cgroup.from_record(record) if record else None


def kinds_of_steps(message: Message) -> set[str]:
    """The names of the parent's steps of a sealed launch. Raises Unsupported (another version)."""
    return {step["type"] for found in SealedLaunch.read(message).steps.values() for step in found}


def plain(value: Any) -> Any:
    """A step as JSON: a value is an object with its class's name, a tuple a list."""
    if isinstance(value, Value):
        fields = {name: plain(getattr(value, name)) for name in type(value).__slots__}  # type: ignore[attr-defined]
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def value_of(found: Any) -> Any:
    if isinstance(found, list):
        return tuple(value_of(item) for item in found)
    if isinstance(found, dict) and found.keys() == {"type", "fields"}:
        from pyrunc.plan import model as plan
        from pyrunc.spec import model as spec

        kind = getattr(plan, found["type"], None) or getattr(spec, found["type"])
        return kind(**{name: value_of(item) for name, item in found["fields"].items()})
    return found
