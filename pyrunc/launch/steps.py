"""The parent's half of a plan: `perform` carries out one step while the new process waits.

The plan defines the steps and their order (`plan.parent`). A failing step fails the launch, with an
error that names the plan's line.
"""

from __future__ import annotations

from pyrunc.launch.idmaps import write_maps
from pyrunc.plan import model as m

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.launch.model import Launch
    from pyrunc.launch.run import ChildProcess, ParentSide
    from pyrunc.plan.model import ParentStep


def perform(step: ParentStep, process: ChildProcess, parent: ParentSide) -> None:
    """Carry out one step. Raises KernelError; PeerError when a hook fails; InvalidSpec or
    Unsupported for the resctrl group of the configuration."""
    launch = parent.request
    match step:
        case m.WriteIdMaps():
            write_maps(process.pid, step.uids, step.gids)
        case m.RecordProcess():
            assert parent.record is not None
            parent.record(process)
        case m.GiveCgroup():
            assert launch.cgroup is not None
            launch.cgroup.give_to(step.uid)
        case m.EnterRdt():
            from pyrunc.launch import rdt

            rdt.enter(step.rdt, launch.id, process.pid, parent.undo, rdt.mounted())
        case m.JoinRdt():
            from pyrunc.launch import rdt

            rdt.join(step.rdt, launch.id, process.pid, rdt.mounted())
        case m.MoveLinks():
            from pyrunc.launch import net_devices

            net_devices.move(step.links, process.pid)
        case m.WriteHookState():
            from pyrunc.launch import hook_process

            # The hook runs in the container's pid namespace, at start: status and pid are those
            # that it sees (runtime.md, "State").
            state = oci_state(launch, hook_process.inner_pid(process.pid), "created")
            hook_process.write_state(launch.descriptors[step.descriptor], state)
        case m.RunHooks():
            _run_hooks(step, process, launch)
        case m.SetLimits():
            from pyrunc.kernel.limit import prlimit

            for limit in step.limits:
                prlimit(process.pid, limit.type, limit.soft, limit.hard)
        case m.ClearOnlcr():
            from pyrunc.kernel.terminal import clear_onlcr

            assert process.console_fd is not None
            # Before the program writes its first line, which would be turned into CR LF twice.
            clear_onlcr(process.console_fd)
        case m.SendListener():
            from pyrunc.launch import listener

            state = oci_state(launch, launch.container_pid or process.pid)
            listener.send(process, step, launch.oci_version, state)
        case _:
            raise AssertionError(f"no parent can carry out {step!r}")


def oci_state(launch: Launch, pid: int, status: str = "") -> dict[str, Any]:
    """Build the state object of runtime-spec runtime.md.

    - `pid`: the process's pid in the pid namespace of the hook or agent that reads the object
    - `status`: the container's status; empty: the status of `launch`
    """
    state: dict[str, Any] = {"ociVersion": launch.oci_version, "id": launch.id}
    state |= {"status": status or launch.status, "pid": pid, "bundle": launch.bundle}
    if launch.annotations:
        state["annotations"] = dict(launch.annotations)
    return state


def _run_hooks(step: m.RunHooks, process: ChildProcess, launch: Launch) -> None:
    from pyrunc.launch import hooks

    if not step.folder:
        hooks.run(step.hooks, step.kind, oci_state(launch, process.pid))
        return
    from pyrunc.launch import hook_process

    state = oci_state(launch, hook_process.inner_pid(process.pid))
    spawn = hook_process.spawner(process, step.namespaces, step.folder)
    hooks.run(step.hooks, step.kind, state, spawn)
