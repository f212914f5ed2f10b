"""`pyrunc-cri stop`, `kill` and `rm`: stop, signal and remove pods and containers. `stopp` and
`rmp` act on pods only."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options, ownership
from cri_server.cli.arguments.selection import Selection
from cri_server.cli.connection.client import Client, ServerError, pod_names
from cri_server.cli.containers.container_root import has_process
from cri_server.cli.manifest import folders
from cri_server.cli.output import show
from cri_server.cli.output.report import for_each, report
from cri_server.rpc import private
from cri_server.spec import signals
from pyrunc.errors import InvalidArgument, Unsupported, WrongState
from pyrunc.kernel.fd import closing_fd

GRACE_S = 10
SECONDS = click.IntRange(0, (1 << 31) - 1)
FORCED = (
    "With --force a pod is removed even if its network plugins fail to detach it, or are missing."
)


@dataclass(frozen=True, slots=True)
class Target:
    """A pod or container that the user has named. `running`: a pod's running containers, or a
    container itself if it runs."""

    name: str
    id: str
    is_pod: bool
    labels: Mapping[str, str]
    running: Sequence[api.Container]


def find(client: Client, name: str, *, only_pods: bool = False) -> Target:
    """Find a pod or container by name or id; with `only_pods` only pods. Raises NotFound
    if none has this name or id, ServerError if several have it."""
    match = client.pod(name) if only_pods else client.pod_or_container(name)
    if isinstance(match, api.Container):
        own = [match] if match.state == api.CONTAINER_RUNNING else []
        return Target(name, match.id, False, _labels(client, match), own)
    containers = client.containers(pod_sandbox_id=match.id)
    running = [c for c in containers if c.state == api.CONTAINER_RUNNING]
    return Target(name, match.id, True, match.labels, running)


def _labels(client: Client, container: api.Container) -> Mapping[str, str]:
    """Return the labels of a container and of its pod. The pod's labels tell who created the
    pod."""
    pods = client.pods(id=container.pod_sandbox_id)
    return {**container.labels, **(pods[0].labels if pods else {})}


def names_argument(*, only_pods: bool) -> Callable[[Any], Any]:
    """Return a click decorator for the argument `names` of stop, stopp, rm and rmp. `only_pods`:
    names of containers are not allowed."""
    if only_pods:
        return options.names("POD...", completion.pods, required=False)
    return options.names("POD|CONTAINER...", completion.both, required=False)


def time_option(default: int | None = None) -> Callable[[Any], Any]:
    """Return a click decorator for the option `-t SECONDS` of stop and rm. `default`: the value
    without the option; None means the manifest's grace period, else 10 s."""
    default_text = (
        f"{default}" if default is not None else f"the manifest's grace period, else {GRACE_S}"
    )
    return click.option(
        *("-t", "--time", "--timeout", "grace_s"),
        type=SECONDS,
        default=default,
        help=f"Seconds before SIGKILL.  [default: {default_text}]",
    )


def grace(container: api.Container, option_s: int | None) -> int:
    """Return the grace period of a container in seconds: `option_s`, else the manifest's value,
    else 10. kubelet and `run` store the manifest's value in an annotation."""
    if option_s is not None:
        return option_s
    text = container.annotations.get(ownership.GRACE, "")
    return min(int(text), SECONDS.max or 0) if text.isdecimal() else GRACE_S


# options that select pods by more than names, and --force
many_options = options.add(
    click.option("-a", "--all", "all_pods", is_flag=True, help="All pods except kubelet's."),
    options.labels("All pods with these labels."),
    click.option("-f", "--force", is_flag=True, help="Do not ask for confirmation."),
    click.option("--kubelet", "kubelets", is_flag=True, help="With --all: also kubelet's pods."),
)

Act = Callable[[Client, Target], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The pods and containers that a verb acts on: the named ones, or all that the options
    select."""

    names: Sequence[str]
    all_pods: bool
    labels: Sequence[str]
    force: bool
    kubelets: bool

    def act(
        self, address: str, verb: str, act: Act, *, only_pods: bool = False, kills: bool = False
    ) -> None:
        """Call `act` for each chosen pod or container and print its name. Asks the user for
        confirmation before it acts on a pod or container of kubelet.

        `kills`: also ask if the user has named a running container, or a pod with running
        containers. Raises Error, click.UsageError."""
        if bool(self.names) == (self.all_pods or bool(self.labels)):
            raise click.UsageError(f"needs either names to {verb}, or --all or --label")
        with Client(address) as client:

            def act_on(name: str) -> None:
                target = find(client, name, only_pods=only_pods)
                if self.names:
                    self._confirm(verb, target, kills=kills)
                act(client, target)
                click.echo(name)

            for_each(self.names or self._selected_pods(client, verb), act_on)

    def _selected_pods(self, client: Client, verb: str) -> list[str]:
        """Return the ids of the pods that --all and --label select; an empty list if the user
        declines."""
        pods = ownership.permitted(
            Selection(labels=self.labels).pods(client), kubelets=self.kubelets
        )
        descriptions = [f"{pod_names(p)[1]}  {p.id[: show.SHORT]}" for p in pods]
        if not ownership.confirm(verb, descriptions, force=self.force):
            return []
        return [p.id for p in pods]

    def _confirm(self, verb: str, target: Target, *, kills: bool) -> None:
        """Ask the user before `verb` acts on kubelet's pods and containers and, with `kills`, on
        running containers. Raises WrongState if the user declines."""
        ownership.permit(verb, target.name, target.labels, force=self.force)
        if kills and target.running:
            names = ", ".join(c.metadata.name for c in target.running)
            running = f"{names} {'are' if len(target.running) > 1 else 'is'} running"
            if not ownership.confirm(verb, [f"{target.name}: {running}"], force=self.force):
                raise WrongState(f"not confirmed: {target.name} is unchanged ({running})")


def _stop_command(verb: str, text: str, *, only_pods: bool) -> click.Command:
    @click.command(verb, help=text)
    @names_argument(only_pods=only_pods)
    @time_option()
    @many_options
    @click.pass_obj
    def stop(address: str, /, names: tuple[str, ...], grace_s: int | None, **flags: Any) -> None:
        def act(client: Client, target: Target) -> None:
            _stop(client, target, grace_s)

        Choice(names, **flags).act(address, "stop", act, only_pods=only_pods)

    return stop


def _stop(client: Client, target: Target, grace_s: int | None) -> None:
    if target.is_pod:
        stop_pod(client, target.id, grace_s)
    else:
        for container in target.running:
            stop_container(client, container, grace_s)


stop = _stop_command("stop", "Stop pods, or single containers.", only_pods=False)
stopp = _stop_command("stopp", "Stop pods.", only_pods=True)


def _rm_command(verb: str, text: str, *, only_pods: bool) -> click.Command:
    @click.command(
        verb,
        help=f"{text}. Running ones are stopped first, after a question or with -f.\n\n{FORCED}",
    )
    @names_argument(only_pods=only_pods)
    @time_option(0)
    @many_options
    @folders.option("The folder in which `run` made the pod's folder.")
    @click.pass_obj
    def rm(
        address: str, /, names: tuple[str, ...], grace_s: int, folder: Path, **flags: Any
    ) -> None:
        choice = Choice(names, **flags)

        def act(client: Client, target: Target) -> None:
            if target.is_pod:
                remove_pod(client, target.id, grace_s, force=choice.force)
                folders.remove(folder, target.id)
            else:
                _stop(client, target, grace_s)
                client.remove_container(target.id)

        choice.act(address, "remove", act, only_pods=only_pods, kills=True)

    return rm


rm = _rm_command("rm", "Remove pods with their containers, or single containers", only_pods=False)
rmp = _rm_command("rmp", "Remove pods with their containers", only_pods=True)


@click.command()
@options.names("CONTAINER|POD...", completion.both, required=False)
@click.option(
    "-s",
    "--signal",
    "signal_name",
    default="KILL",
    show_default=True,
    metavar="SIGNAL",
    help="A name or a number.",
)
@many_options
@click.pass_obj
def kill(address: str, /, names: tuple[str, ...], signal_name: str, **flags: Any) -> None:
    """Send a signal to the main process of containers, or of all containers of pods. Needs root on
    the server's machine."""
    number = signal_number(signal_name)

    def act(client: Client, target: Target) -> None:
        if not target.running:
            raise WrongState(f"{target.name} is not running")
        for container in target.running:
            _send(client, container, number)

    Choice(names, **flags).act(address, "kill", act)


def signal_number(text: str) -> int:
    """Parse `TERM`, `SIGTERM`, `15` or `RTMIN+1`. Raises InvalidArgument."""
    try:
        return signals.number(signals.from_text(text))
    except InvalidArgument:
        raise InvalidArgument(f"--signal {text}: no such signal") from None


def _send(client: Client, container: api.Container, number: int) -> None:
    """Send the signal `number` to the main process of a container. Raises WrongState if the
    container does not run on this machine, or if the user is not root."""
    pid = client.container_info(container.id).get("pid", 0)
    try:
        if not pid:
            raise ProcessLookupError
        # The kernel may reuse the pid between the server's answer and kill(2), but not a pidfd.
        with closing_fd(os.pidfd_open(pid)) as descriptor:
            if not has_process(client, container.id, pid):
                raise ProcessLookupError
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        raise WrongState(
            f"container {container.metadata.name} is not running on this machine"
        ) from None
    except PermissionError:
        raise WrongState(
            f"container {container.metadata.name}: only root can send it a signal"
        ) from None


def stop_pod(client: Client, pod: str, grace_s: int | None) -> None:
    """Stop all containers of a pod, then its sandbox. Sidecars are stopped after the other
    containers and in reverse order of creation, as kubelet does. `grace_s`: the grace period in
    seconds; None: the value in the manifest, else 10 s."""
    containers = sorted(client.containers(pod_sandbox_id=pod), key=lambda c: c.created_at)
    sidecars = [c for c in containers if ownership.SIDECAR in c.labels]
    # Other containers may need their sidecars (proxies, log shippers) until they have ended.
    for container in [*(c for c in containers if c not in sidecars), *reversed(sidecars)]:
        stop_container(client, container, grace_s)
    client.call(api.StopPodSandboxRequest(pod_sandbox_id=pod))


def remove_pod(client: Client, pod: str, grace_s: int | None, *, force: bool = False) -> None:
    """Stop and remove a pod with its containers. With `force`, a network plugin that fails causes
    only a warning. Raises ServerError."""
    try:
        stop_pod(client, pod, grace_s)
        client.call(api.RemovePodSandboxRequest(pod_sandbox_id=pod))
    except ServerError:
        if not force or not _release_network(client, pod):
            raise
        remove_pod(client, pod, grace_s)


def _release_network(client: Client, pod: str) -> bool:
    """Make the server release the network of a stopped pod even if CNI plugins fail. Prints their
    errors, and returns True if a plugin failed."""
    try:
        lines = client.admin(private.ReleaseNetwork(pod), private.Refusals, None).lines
    except (ServerError, Unsupported):
        return False
    for line in lines:
        report(f"warning: the pod's network was not detached: {line}")
    return bool(lines)


def stop_container(client: Client, container: api.Container, grace_s: int | None) -> None:
    """Stop a container. `grace_s`: the grace period in seconds; None: the value in the manifest,
    else 10 s."""
    seconds = grace(container, grace_s)
    request = api.StopContainerRequest(container_id=container.id, timeout=seconds)
    # the additional time is for processes that take long to die after SIGKILL
    client.call(request, seconds + 30.0)
