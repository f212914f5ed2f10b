"""The parent's half of a plan: one function that carries out a step, whatever it is, while the new process waits.

Which steps there are and in which order is the plan's (`plan.parent`). A step that fails fails the launch; its error names the
plan's line.
"""

from __future__ import annotations

from pyrunc.compile.idmaps import write_maps
from pyrunc.plan import model as m
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, assert_never

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.launch.run import Born
    from pyrunc.plan.model import Step
    from pyrunc.spec.model import Linux
    from pyrunc.undo import Undo
else:

    def assert_never(step):
        raise AssertionError(f"no parent can carry out {step!r}")


class StepContext(Value):
    """What the steps of one launch work on, beside the process.

    `id`, `bundle` (absolute), `oci_version` and `annotations` are the container's, for the state that others read; `status` is
    its status meanwhile, `container_pid` its first process if that is not the new one. `descriptors`: by the plan's names.
    `undo` gets what a step makes. `record(process)` puts the process into the state on disk.
    """

    id: str
    bundle: str
    oci_version: str
    annotations: Mapping[str, str]
    linux: Linux
    descriptors: Mapping[str, int]
    undo: Undo
    status: str = "creating"
    container_pid: int = 0
    cgroup: Cgroup | None = None
    record: Callable[[Born], object] | None = None


def perform(step: Step, process: Born, context: StepContext) -> None:
    """Carry out one step. Raises what it raises: KernelError, InvalidSpec, PeerError for a hook."""
    match step:
        case m.WriteIdMaps():
            write_maps(process.pid, step.uids, step.gids)
        case m.RecordProcess():
            assert context.record is not None
            context.record(process)
        case m.GiveCgroup():
            assert context.cgroup is not None
            context.cgroup.give_to(step.uid)
        case m.EnterRdt():
            from pyrunc.launch import rdt

            rdt.enter(step.rdt, context.id, process.pid, context.undo, rdt.mounted())
        case m.JoinRdt():
            from pyrunc.launch import rdt

            rdt.join(step.rdt, context.id, process.pid, rdt.mounted())
        case m.MoveLinks():
            from pyrunc.launch import net_devices

            net_devices.move(step.links, process.pid)
        case m.WriteHookState():
            from pyrunc.launch import hook_process as inside

            state = oci_state(context, inside.inner_pid(process.pid), "created")
            inside.write_state(context.descriptors[step.descriptor], state)
        case m.RunHooks():
            _run_hooks(step, process, context)
        case m.SetLimits():
            from pyrunc.kernel.limit import prlimit

            for limit in step.limits:
                prlimit(process.pid, limit.type, limit.soft, limit.hard)
        case m.ClearOnlcr():
            from pyrunc.kernel.terminal import clear_onlcr

            assert process.console_fd is not None
            clear_onlcr(process.console_fd)
        case m.SendListener():
            from pyrunc.launch import listener

            state = oci_state(context, context.container_pid or process.pid)
            listener.send(process, step, context.oci_version, state)
        case _:
            assert_never(step)


def oci_state(context: StepContext, pid: int, status: str = "") -> dict[str, Any]:
    """The state object of runtime-spec runtime.md; `pid` as its reader sees it."""
    state: dict[str, Any] = {"ociVersion": context.oci_version, "id": context.id}
    state |= {"status": status or context.status, "pid": pid, "bundle": context.bundle}
    if context.annotations:
        state["annotations"] = dict(context.annotations)
    return state


def _run_hooks(step: m.RunHooks, process: Born, context: StepContext) -> None:
    from pyrunc.launch import hooks

    if not step.folder:
        hooks.run(step.hooks, step.kind, oci_state(context, process.pid))
        return
    from pyrunc.launch import hook_process as inside

    state = oci_state(context, inside.inner_pid(process.pid))
    hooks.run(step.hooks, step.kind, state, inside.spawner(process, context.linux, step.folder))
