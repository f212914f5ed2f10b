"""A pod's pause process becomes a launch: the process that keeps the namespaces of a pod while its
containers come and go."""

from __future__ import annotations

import os

from pyrunc.compile import host as facts
from pyrunc.compile.container import Compiled
from pyrunc.compile.descriptors import (
    PINNED,
    CgroupChoice,
    Descriptors,
    compiled_filter,
    open_cgroup,
    open_namespaces,
    refuse_settings_of_the_host,
)
from pyrunc.errors import InvalidArgument, InvalidSpec, KernelError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.launch.model import Launch
from pyrunc.parts import Parts
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.namespaces import KERNEL_NAMES
from pyrunc.program.launch import LAUNCHER
from pyrunc.spec.check import check_namespaces, settings_by_namespace
from pyrunc.spec.model import Linux, Namespace, Spec
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.spec.model import IdMap
    from pyrunc.undo import Undo

_NO_MOUNTS: Mapping[str, int] = {}


class PauseRequest(Value):
    """A pod's pause process.

    `namespaces`: type (`network`, `ipc`, `uts`, `pid`, `user`) -> `new`, an absolute path to join,
    `pinned` for one that whoever launches adds (`Launch.pinned`), or `host` or `none` for the
    caller's. The mount namespace is always its own. A new user namespace needs the mappings, and
    owns the others. `mounts`: folder in it -> a detached mount that containers will get clones of;
    attached only where the kernel needs it. `timed`: the program tells when each operation is done.
    `made_cgroup`: it exists. `selinux_label`: the process's; `program_label`: of the file that it
    executes, which is in memory and has no label that a policy lets it enter by.
    """

    id: str
    namespaces: Mapping[str, str]
    hostname: str = ""
    sysctls: Mapping[str, str] = {}
    cgroups_path: str = ""
    cgroup: CgroupChoice | None = CgroupChoice()
    oom_score_adj: int | None = None
    seccomp: Mapping[str, Any] | None = None
    uid: int = 65535
    gid: int = 65535
    uid_mappings: tuple[IdMap, ...] = ()
    gid_mappings: tuple[IdMap, ...] = ()
    mounts: Mapping[str, int] = _NO_MOUNTS
    timed: bool = False
    selinux_label: str = ""
    program_label: str = ""
    made_cgroup: Cgroup | None = None


def compile_pause(
    request: PauseRequest, descriptors: Descriptors, undo: Undo, parts: Parts | None = None
) -> Compiled:
    """The launch of the pause process, with an empty read-only root, no capabilities, no new
    privileges. What else is made is pushed on `undo`. Raises InvalidArgument, InvalidSpec,
    KernelError."""
    parts = parts or Parts()
    linux = Linux(
        namespaces=tuple(_namespaces(request.namespaces)),
        sysctl=request.sysctls,
        cgroups_path=request.cgroups_path,
        uid_mappings=request.uid_mappings,
        gid_mappings=request.gid_mappings,
    )
    check_namespaces(linux)
    linux = linux.replace(
        namespaces=tuple(_pinned(entry, request.namespaces) for entry in linux.namespaces)
    )
    spec = Spec("", hostname=request.hostname, linux=linux)
    _refuse_settings_of_the_host(spec)
    load_filter = compiled_filter(request.seccomp, None)
    open_namespaces(linux, descriptors)
    refuse_settings_of_the_host(spec, descriptors)
    if linux.sysctl:
        descriptors.take("proc", kernel_mount.open_mount("proc"))
    descriptors.take("pause", _open_pause(request.program_label))
    places = () if facts.host().clones_detached else tuple(request.mounts)
    for place in places:
        descriptors.take(f"mount:{place}", os.dup(request.mounts[place]))
    parts.end("check, namespaces, filter")
    cgroup, warnings = open_cgroup(
        request.id,
        linux,
        {},
        request.cgroup,
        descriptors,
        undo,
        made=request.made_cgroup,
    )
    parts.end("cgroup")
    plan = plans.build_pause(
        linux,
        facts.host(),
        plans.PauseOptions(
            hostname=request.hostname,
            uid=request.uid,
            gid=request.gid,
            load_filter=load_filter,
            oom_score_adj=request.oom_score_adj,
            mounts=places,
            cgroup=cgroup is not None,
            selinux_label=request.selinux_label,
        ),
    )
    pinned = {
        f"namespace:{kind}": kind for kind, how in request.namespaces.items() if how == "pinned"
    }
    lowered = lower(plan, timed=request.timed)
    parts.end("plan and lower")
    launch = Launch(
        lowered,
        descriptors.numbers,
        (),
        args=("pause",),
        pinned=pinned,
        id=request.id,
        cgroup=cgroup,
    )
    return Compiled(launch, plan, (*warnings, *plan.warnings))


def _refuse_settings_of_the_host(spec: Spec) -> None:
    """A pod that shares a namespace with the host sets nothing in it. Raises InvalidSpec."""
    for kind, path in settings_by_namespace(spec).items():
        if spec.linux.namespace(kind) is None:
            raise InvalidSpec(path, f"needs a {kind} namespace of its own")


def _pinned(entry: Namespace, chosen: Mapping[str, str]) -> Namespace:
    """A namespace that whoever launches adds is joined, under a name that is no path."""
    return (
        entry.replace(path=f"{PINNED}{entry.type}") if chosen.get(entry.type) == "pinned" else entry
    )


def _namespaces(chosen: Mapping[str, str]) -> list[Namespace]:
    entries = [Namespace("mount")]
    for kind, how in chosen.items():
        if kind not in KERNEL_NAMES or kind == "mount":
            raise InvalidArgument(f"a pause process has no {kind} namespace of its own choice")
        if how in ("new", "pinned"):
            entries.append(Namespace(kind))
        elif how.startswith("/"):
            entries.append(Namespace(kind, how))
        elif how not in ("host", "none"):
            raise InvalidArgument(
                f"namespace {kind}: {how!r} is not new, host, none, pinned or a path"
            )
    return entries


_pause: int | None = None


def _open_pause(label: str = "") -> int:
    """A copy of the descriptor of the sealed pause program, made once per process like the
    launcher's; `label`: SELinux's, which is the same for all. Raises KernelError."""
    global _pause
    if _pause is None:
        from pyrunc.kernel.fd import open_sealed_executable

        with open(os.path.join(os.path.dirname(LAUNCHER), "pause"), "rb", buffering=0) as file:
            made = open_sealed_executable("pyrunc:pause", file.readall() or b"")
        if label:
            _label(made, label)
        _pause = made
    return os.dup(_pause)


def _label(descriptor: int, label: str) -> None:
    try:
        os.setxattr(f"/proc/self/fd/{descriptor}", "security.selinux", label.encode())
    except OSError as error:
        os.close(descriptor)
        raise KernelError.of(
            error, "setxattr", f"security.selinux={label} of the pause program"
        ) from None
