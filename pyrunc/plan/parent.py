"""Which steps the parent has at which sync point: the half of a plan that the runtime itself
carries out. Pure.

| point | the process | its parent |
|---|---|---|
| born | exists, in its namespaces and cgroup, with no rights to speak of | id maps, record,
cgroup's owner, RDT, links |
| mounted | has its root and mounts, not pivoted | prestart and createRuntime hooks, in the
runtime's namespaces |
| before-pivot | the same | createContainer hooks, in the container's |
| before-identity | is still root of its namespaces, has its terminal | limits that it may not raise
itself, ONLCR |
| listener | has loaded its filter | sends the filter's listener away |

The order of `born`: nobody can act in a user namespace without maps; then the record, so that a
create that is killed leaves nothing that `delete` does not find; then what can fail.
"""

from __future__ import annotations

from pyrunc.plan import model
from pyrunc.plan.namespaces import own
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyrunc.plan.model import LoadFilter, Op, Step
    from pyrunc.spec.model import Linux, Process, Spec

    Steps = Mapping[str, tuple[Step, ...]]

HOOK_STATE, HOOK_STDERR = "hook-state", "hook-stderr"
"""The descriptors of the memfds with the state that startContainer hooks read, and with what the
last one wrote."""


class Parent(Value):
    """What the runtime does beyond what the configuration asks for.

    `record`: the container has a state on disk. `cgroup_owner`: the host's uid that gets the
    cgroup, None = nobody. `hook_folder`: where createContainer hooks find the root. `attached`: we
    stay and copy the process's terminal to ours.
    """

    record: bool = False
    cgroup_owner: int | None = None
    hook_folder: str = ""
    attached: bool = False


def steps_of_start(spec: Spec, parent: Parent) -> Steps:
    """Sync point -> steps of a container's start, without points that have none."""
    linux, hooks = spec.linux, spec.hooks
    born: list[Step] = [*_id_maps(linux)]
    if parent.record:
        born.append(model.RecordProcess())
    if hooks.start_container:
        born.append(model.WriteHookState(HOOK_STATE))
    if parent.cgroup_owner is not None:
        # Not before: who has joined a user namespace could not be born in a group of another's.
        born.append(model.GiveCgroup(parent.cgroup_owner))
    if linux.intel_rdt:
        born.append(model.EnterRdt(linux.intel_rdt))
    if linux.net_devices:
        born.append(model.MoveLinks(linux.net_devices))
    mounted: list[Step] = []
    if hooks.prestart:
        mounted.append(model.RunHooks("prestart", hooks.prestart))
    if hooks.create_runtime:
        mounted.append(model.RunHooks("createRuntime", hooks.create_runtime))
    inside: list[Step] = []
    if hooks.create_container:
        inside.append(
            model.RunHooks(
                "createContainer", hooks.create_container, parent.hook_folder, own(linux)
            )
        )
    return _some(
        {
            "born": born,
            "mounted": mounted,
            "before-pivot": inside,
            "before-identity": [
                *_limits(linux, spec.process),
                *_terminal(spec.process, parent.attached),
            ],
            "listener": _listener(linux),
        }
    )


def steps_of_exec(linux: Linux, process: Process, attached: bool = False) -> Steps:
    """Sync point -> steps of a process that enters a container; `attached` as in `Parent`."""
    born: list[Step] = [model.JoinRdt(linux.intel_rdt)] if linux.intel_rdt else []
    late = [*_limits(linux, process), *_terminal(process, attached)]
    return _some({"born": born, "before-identity": late, "listener": _listener(linux)})


def steps_of_pause(linux: Linux) -> Steps:
    """Sync point -> steps of a pod's pause process."""
    return _some({"born": _id_maps(linux)})


def sync(point: str, steps: Steps) -> list[Op]:
    """The operation that waits at `point`, when the parent has something to do there."""
    return [model.Sync(point, steps[point])] if point in steps else []


def with_listener(load_filter: LoadFilter | None, steps: Steps) -> LoadFilter | None:
    """The filter, with what the parent does with its listener."""
    if load_filter is None or not load_filter.listener:
        return load_filter
    return load_filter.replace(steps=steps.get("listener", ()))


def _some(found: Mapping[str, list[Step]]) -> Steps:
    return {point: tuple(steps) for point, steps in found.items() if steps}


def _id_maps(linux: Linux) -> list[Step]:
    user = linux.namespace("user")
    if user is None or user.path:
        return []
    return [model.WriteIdMaps(linux.uid_mappings, linux.gid_mappings)]


def _limits(linux: Linux, process: Process | None) -> list[Step]:
    if process is None or not process.rlimits or linux.namespace("user") is None:
        return []
    return [model.SetLimits(process.rlimits)]


def _terminal(process: Process | None, attached: bool) -> list[Step]:
    return [model.ClearOnlcr()] if attached and process is not None and process.terminal else []


def _listener(linux: Linux) -> list[Step]:
    seccomp = linux.seccomp or {}
    path = str(seccomp.get("listenerPath") or "")
    return [model.SendListener(path, str(seccomp.get("listenerMetadata") or ""))] if path else []
