"""Compiles the launch of a pod's pause process, which holds the pod's namespaces."""

from __future__ import annotations

import os
from errno import EROFS

from pyrunc.compile import host
from pyrunc.compile.container import CompiledLaunch
from pyrunc.compile.descriptors import (
    PINNED,
    NamedDescriptors,
    compiled_filter,
    make_cgroup,
    open_namespaces,
    refuse_settings_of_the_host,
)
from pyrunc.errors import InvalidArgument, InvalidSpec, KernelError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.launch.model import Launch
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.program.launch import LAUNCHER, open_program
from pyrunc.spec.check import check_namespaces, settings_by_namespace
from pyrunc.spec.model import KERNEL_NAMES, IdMap, Linux, Namespace, Spec
from pyrunc.timings import Timings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.compile.requests import PauseRequest
    from pyrunc.undo import Undo


def compile_pause(
    identifier: str,
    request: PauseRequest,
    descriptors: NamedDescriptors,
    undo: Undo,
    timings: Timings | None = None,
    *,
    mounts: Mapping[str, int] = {},
    existing_cgroup: Cgroup | None = None,
    timed: bool = False,
) -> CompiledLaunch:
    """Compile the launch of a pod's pause process, which has an empty read-only root, no
    capabilities, and no_new_privs. Raises InvalidArgument, InvalidSpec, KernelError.

    - `identifier`: the cgroup's name
    - `undo`: gets a step that removes a new cgroup
    - `mounts`: folder in the pause process's root -> detached mount that containers will clone.
      Before Linux 6.15 the kernel clones attached mounts only, so the pause process attaches these
      mounts to their folders.
    - `existing_cgroup`: use this cgroup instead of making one
    - `timed`: the launch reports when each operation is done
    """
    timings = timings or Timings()
    linux = Linux(
        namespaces=tuple(_namespaces(request.namespaces)),
        sysctl=request.sysctls or {},
        cgroups_path=request.cgroups_path,
        uid_mappings=_id_maps(request.uid_mappings),
        gid_mappings=_id_maps(request.gid_mappings),
    )
    check_namespaces(linux)
    linux = linux.replace(
        namespaces=tuple(_pinned(entry, request.namespaces) for entry in linux.namespaces)
    )
    spec = Spec("", hostname=request.hostname, linux=linux)
    _refuse_settings_without_namespace(spec)
    load_filter = compiled_filter(request.seccomp)
    open_namespaces(linux, descriptors)
    refuse_settings_of_the_host(spec, descriptors)
    if linux.sysctl:
        # A private procfs, in which no container or host mount covers a setting.
        descriptors.take("proc", kernel_mount.open_mount("proc"))
    descriptors.take("pause", _open_pause(request.program_label))
    # Before Linux 6.15 a mount can be cloned only where it is attached, so the pause process's
    # mount namespace holds it.
    places = () if host.constant_facts().clones_detached else tuple(mounts)
    for place in places:
        descriptors.take(f"mount:{place}", os.dup(mounts[place]))
    timings.end("check, namespaces, filter")
    cgroup, warnings = make_cgroup(
        identifier,
        linux,
        {},
        request.cgroup,
        descriptors,
        undo,
        existing=existing_cgroup,
    )
    timings.end("cgroup")
    plan = plans.build_pause(
        linux,
        host.host(),
        plans.PausePlanOptions(
            hostname=request.hostname,
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
    lowered = lower(plan, timed=timed)
    timings.end("plan and lower")
    launch = Launch(
        lowered,
        descriptors.numbers,
        (),
        args=("pause",),
        pinned=pinned,
        id=identifier,
        cgroup=cgroup,
    )
    return CompiledLaunch(launch, plan, (*warnings, *plan.warnings))


def _id_maps(entries: Sequence[Mapping[str, int]]) -> tuple[IdMap, ...]:
    return tuple(IdMap(entry["containerID"], entry["hostID"], entry["size"]) for entry in entries)


def _refuse_settings_without_namespace(spec: Spec) -> None:
    """Raise InvalidSpec for settings of a namespace that the pod shares with the host."""
    for kind, path in settings_by_namespace(spec).items():
        if spec.linux.namespace(kind) is None:
            raise InvalidSpec(path, f"needs a {kind} namespace other than the host's")


def _pinned(entry: Namespace, chosen: Mapping[str, str]) -> Namespace:
    """Return the namespace `entry`. The path of the result is `PINNED` + TYPE if the launching
    process adds the namespace.

    `chosen`: the request's `namespaces`, with the value `pinned` for a type that the launching
    process adds.
    """
    return (
        entry.replace(path=f"{PINNED}{entry.type}") if chosen.get(entry.type) == "pinned" else entry
    )


def _namespaces(chosen: Mapping[str, str]) -> list[Namespace]:
    entries = [Namespace("mount")]
    for kind, how in chosen.items():
        if kind == "mount":
            raise InvalidArgument("namespace mount: a pause process always gets a new one")
        if kind not in KERNEL_NAMES:
            raise InvalidArgument(f"namespace {kind}: not a type of namespace")
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
    """Return a descriptor of the executable `pause`, which the caller closes. Raises KernelError.

    The first call opens the file with `open_program`. If this gives a memfd, and `label` is not
    empty, the memfd gets the SELinux label `label`. Later calls return copies of that descriptor
    and ignore `label`, so every call must pass the same label.
    """
    global _pause
    if _pause is None:
        program_fd = open_program(os.path.join(os.path.dirname(LAUNCHER), "pause"))
        if label:
            _label(program_fd, label)
        _pause = program_fd
    # A copy, because the caller closes all descriptors of its launch.
    return os.dup(_pause)


def _label(descriptor: int, label: str) -> None:
    try:
        os.setxattr(f"/proc/self/fd/{descriptor}", "security.selinux", label.encode())
    except OSError as error:
        # Not a memfd but the file on the disk, which has the policy's label.
        if error.errno == EROFS:
            return
        os.close(descriptor)
        raise KernelError.of(
            error, "setxattr", f"security.selinux={label} of the pause program"
        ) from None
