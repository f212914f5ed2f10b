"""Plans the parent's steps: the half of a plan that the runtime carries out. Reads and changes
nothing on the host.

Each sync point, with the state of the process and the steps of its parent:

- `cloned`: the process is in its namespaces and cgroup, with hardly any rights. Steps: id maps,
  state.json, stdin of startContainer hooks, cgroup's owner, RDT, network devices.
- `mounted`: the process has its root and mounts, but has not called pivot_root. Steps: prestart and
  createRuntime hooks, in the runtime's namespaces.
- `before-pivot`: the same state. Steps: createContainer hooks, in the container's namespaces.
- `before-identity`: the process has its terminal and is still root of its namespaces. Steps: limits
  that the process may not raise, ONLCR.
- `listener`: the process has loaded its filter. Step: send the filter's listener to the agent.

The order of the steps at `cloned`: the id maps come first, because no process can act in a user
namespace without them. The write of state.json comes next: if the runtime is killed afterwards,
`delete` finds the process. The steps that can fail come last.
"""

from __future__ import annotations

from pyrunc.plan import model
from pyrunc.plan.namespaces import own
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyrunc.plan.model import LoadFilter, Op, ParentStep
    from pyrunc.spec.model import Linux, Process, Spec

    Steps = Mapping[str, tuple[ParentStep, ...]]

HOOK_STATE, HOOK_STDERR = "hook-state", "hook-stderr"
"""The plan's names for the descriptors of two memfds: the state that startContainer hooks read, and
the stderr of the last hook."""


class ParentOptions(Value):
    """The parent's tasks beyond the configuration.

    - `record`: write the process to the container's state.json
    - `cgroup_owner`: the uid on the host that gets the cgroup, or None
    - `hook_folder`: where createContainer hooks find the root
    - `attached`: the runtime stays and copies the process's terminal to its own
    """

    record: bool = False
    cgroup_owner: int | None = None
    hook_folder: str = ""
    attached: bool = False


def steps_of_start(spec: Spec, parent: ParentOptions) -> Steps:
    """Return the steps of the parent during a container's start: sync point -> steps. Points
    without steps are left out."""
    linux, hooks = spec.linux, spec.hooks
    cloned: list[ParentStep] = [*_id_maps(linux)]
    # As early as possible: if the runtime is killed after the clone, only state.json names the
    # process.
    if parent.record:
        cloned.append(model.RecordProcess())
    if hooks.start_container:
        cloned.append(model.WriteHookState(HOOK_STATE))
    if parent.cgroup_owner is not None:
        # Not before: a process that has joined a user namespace could not be cloned into a group of
        # another owner.
        cloned.append(model.GiveCgroup(parent.cgroup_owner))
    if linux.intel_rdt:
        cloned.append(model.EnterRdt(linux.intel_rdt))
    if linux.net_devices:
        cloned.append(model.MoveLinks(linux.net_devices))
    mounted: list[ParentStep] = []
    # prestart is deprecated, but GPU hooks still use it; it runs first (config.md, "Prestart").
    if hooks.prestart:
        mounted.append(model.RunHooks("prestart", hooks.prestart))
    if hooks.create_runtime:
        mounted.append(model.RunHooks("createRuntime", hooks.create_runtime))
    inside: list[ParentStep] = []
    if hooks.create_container:
        inside.append(
            model.RunHooks(
                "createContainer", hooks.create_container, parent.hook_folder, own(linux)
            )
        )
    return _non_empty(
        {
            "cloned": cloned,
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
    """Return the steps of the parent during an exec: sync point -> steps. `attached`: the runtime
    stays and copies the process's terminal to its own."""
    cloned: list[ParentStep] = [model.JoinRdt(linux.intel_rdt)] if linux.intel_rdt else []
    late = [*_limits(linux, process), *_terminal(process, attached)]
    return _non_empty({"cloned": cloned, "before-identity": late, "listener": _listener(linux)})


def steps_of_pause(linux: Linux) -> Steps:
    """Return the steps of the parent during the start of a pause process: sync point -> steps."""
    return _non_empty({"cloned": _id_maps(linux)})


def sync(point: str, steps: Steps) -> list[Op]:
    """Return a list with the `Sync` at which the process waits for the parent's steps at `point`.
    Empty if there are no such steps."""
    return [model.Sync(point, steps[point])] if point in steps else []


def with_listener(load_filter: LoadFilter | None, steps: Steps) -> LoadFilter | None:
    """Return `load_filter`. If the filter has a listener, the result's `steps` are the parent's
    steps for the sync point `listener`."""
    if load_filter is None or not load_filter.listener:
        return load_filter
    return load_filter.replace(steps=steps.get("listener", ()))


def _non_empty(steps_by_point: Mapping[str, list[ParentStep]]) -> Steps:
    return {point: tuple(steps) for point, steps in steps_by_point.items() if steps}


def _id_maps(linux: Linux) -> list[ParentStep]:
    user = linux.namespace("user")
    if user is None or user.path:
        return []
    return [model.WriteIdMaps(linux.uid_mappings, linux.gid_mappings)]


def _limits(linux: Linux, process: Process | None) -> list[ParentStep]:
    if process is None or not process.rlimits or linux.namespace("user") is None:
        return []
    # Raising a hard limit needs CAP_SYS_RESOURCE in the machine's user namespace (prlimit(2)),
    # which the process has lost.
    return [model.SetLimits(process.rlimits)]


def _terminal(process: Process | None, attached: bool) -> list[ParentStep]:
    # Only when we copy the terminal to ours: an engine that gets the master sets it up itself.
    return [model.ClearOnlcr()] if attached and process is not None and process.terminal else []


def _listener(linux: Linux) -> list[ParentStep]:
    seccomp = linux.seccomp or {}
    path = str(seccomp.get("listenerPath") or "")
    return [model.SendListener(path, str(seccomp.get("listenerMetadata") or ""))] if path else []
