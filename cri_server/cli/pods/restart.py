"""`pyrunc-cri restart` and `start`: create another attempt of a container or of a stopped pod, as
kubelet does.

The last attempt of a container is kept for `logs -p`. These verbs need a server of pyrunc-cri,
because CRI cannot return the configuration that a container was created from. Containers of
kubelet's pods are only stopped, because kubelet starts them again.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options, ownership
from cri_server.cli.connection.client import Client, ServerError, latest_attempts, pod_names
from cri_server.cli.containers import sources, stop
from cri_server.cli.manifest import folders, host_names
from cri_server.cli.output.report import for_each
from cri_server.cli.pods import run
from pyrunc.errors import WrongState


@click.command()
@options.names("CONTAINER|POD...", completion.both)
@stop.time_option()
@click.option("-f", "--force", is_flag=True, help="Do not ask about containers of kubelet.")
@folders.option("The folder in which `run` made the pod's folder.")
@click.pass_obj
def restart(
    address: str, names: tuple[str, ...], grace_s: int | None, force: bool, folder: Path
) -> None:
    """Restart containers, or all containers of pods; a stopped pod starts again."""
    with Client(address) as client:
        for_each(names, lambda name: _restart(client, name, grace_s, force, folder))


@click.command()
@options.names("CONTAINER|POD...", completion.both)
@folders.option("The folder in which `run` made the pod's folder.")
@click.pass_obj
def start(address: str, names: tuple[str, ...], folder: Path) -> None:
    """Start containers that were created or have ended, or pods that were stopped."""
    with Client(address) as client:
        for_each(names, lambda name: _start(client, name, folder))


def _restart(client: Client, name: str, grace_s: int | None, force: bool, folder: Path) -> None:
    target = stop.find(client, name)
    ownership.permit("restart", name, target.labels, force=force)
    if ownership.owner(target.labels) == "kubelet":
        _stop_kubelets(client, target, grace_s)
    elif target.is_pod:
        _restart_pod(client, client.pod(target.id), grace_s, folder)
    else:
        _refuse_stopped_pod(client, target)
        restart_container(client, client.container(target.id), grace_s)
    click.echo(name)


def _stop_kubelets(client: Client, target: stop.Target, grace_s: int | None) -> None:
    """Stop the running containers of `target`, a pod or container of kubelet. kubelet starts them
    again. Raises WrongState if no container runs."""
    if not target.running:
        raise WrongState(f"{target.name} is not running and belongs to kubelet, which starts it")
    for container in target.running:
        stop.stop_container(client, container, grace_s)


def _restart_pod(client: Client, pod: api.PodSandbox, grace_s: int | None, folder: Path) -> None:
    if pod.state != api.SANDBOX_READY:
        restart_stopped_pod(client, pod, folder)
        return
    containers = _main_containers(client, pod)
    if not containers:
        raise WrongState(f"pod {pod_names(pod)[1]} has no containers")
    for container in containers:
        restart_container(client, container, grace_s)


def _start(client: Client, name: str, folder: Path) -> None:
    target = stop.find(client, name)
    if ownership.owner(target.labels) == "kubelet":
        raise WrongState(f"{name} belongs to kubelet, so only kubelet may start it")
    if not target.is_pod:
        _refuse_stopped_pod(client, target)
        _start_container(client, client.container(target.id))
    elif (pod := client.pod(target.id)).state != api.SANDBOX_READY:
        restart_stopped_pod(client, pod, folder)
    else:
        containers = _main_containers(client, pod)
        ended = [c for c in containers if c.state != api.CONTAINER_RUNNING]
        if not ended:
            raise WrongState(f"pod {pod_names(pod)[1]} and its containers are running already")
        for container in ended:
            _start_container(client, container)
    click.echo(name)


def _refuse_stopped_pod(client: Client, target: stop.Target) -> None:
    """Check that a container's pod is not stopped, since CRI cannot start containers in a stopped
    pod. Raises WrongState."""
    container = client.container(target.id)
    for pod in client.pods(id=container.pod_sandbox_id):
        if pod.state != api.SANDBOX_READY:
            raise WrongState(
                f"container {target.name}: its pod {pod_names(pod)[1]} is stopped;"
                f" pyrunc-cri start {pod_names(pod)[1]} starts both"
            )


def _start_container(client: Client, container: api.Container) -> None:
    if container.state == api.CONTAINER_RUNNING:
        raise WrongState(f"container {container.metadata.name} is running already")
    if container.state == api.CONTAINER_CREATED:
        client.start_container(container.id)
    else:
        restart_container(client, container, 0)


def restart_container(client: Client, container: api.Container, grace_s: int | None) -> str:
    """Stop a container, start its next attempt, and return the id of that attempt. Keeps the
    stopped attempt, and removes older ones unless they run. Raises ServerError."""
    config, sandbox = client.container_config(container.id)
    without_links = sources.paths_without_links(client, container.id, config)
    others = _attempts(client, container)
    stop.stop_container(client, container, grace_s)
    attempt = max(c.metadata.attempt for c in others) + 1
    identifier = _make(client, container.pod_sandbox_id, sandbox, config, attempt, without_links)
    for previous in others:
        if previous.id != container.id and previous.state != api.CONTAINER_RUNNING:
            client.remove_container(previous.id)
    return identifier


def restart_stopped_pod(client: Client, pod: api.PodSandbox, folder: Path) -> str:
    """Start another attempt of a stopped pod with its containers, and return the new pod's id. Init
    containers run first, one after the other. `folder`: the value of --folder, below which `run`
    made the pod's folder.

    Removes the stopped pod after a successful start, and the new pod after an error. Raises
    ServerError."""
    containers = _newest(client, pod)
    configs = {c.id: client.container_config(c.id)[0] for c in containers}
    without_links = {
        c.id: sources.paths_without_links(client, c.id, configs[c.id]) for c in containers
    }
    config = client.pod_config(pod.id)
    config.metadata.attempt = pod.metadata.attempt + 1
    new_pod = client.run_pod(config, pod.runtime_handler)
    try:
        addresses = run.addresses(client, new_pod)
        for own_folder in folders.folders_of(folder, pod.id):
            host_names.renew(own_folder, config.hostname, addresses)
        for container in containers:
            attempt = container.metadata.attempt + 1
            config_of_container = configs[container.id]
            _readdress(config_of_container, addresses)
            identifier = _make(
                client, new_pod, config, config_of_container, attempt, without_links[container.id]
            )
            if ownership.INIT in container.labels:
                run.wait_init(client, identifier, container.metadata.name)
        folders.change_owner(folder, pod.id, new_pod)
    except BaseException:
        run.discard(client, new_pod, 0)
        raise
    stop.remove_pod(client, pod.id, 0)
    return new_pod


def _readdress(config: api.ContainerConfig, addresses: Sequence[str]) -> None:
    """Replace the pod's former addresses by `addresses` in a container's environment, command and
    arguments. Does nothing unless the manifest used status.podIP or status.podIPs."""
    before = config.annotations.get(ownership.ADDRESSES, "").split(",")
    if before == [""]:
        return
    for variable in config.envs:
        text = variable.value.decode(errors="surrogateescape")
        variable.value = host_names.replace_addresses(text, before, addresses).encode(
            errors="surrogateescape"
        )
    for arguments in (config.command, config.args):
        arguments[:] = [host_names.replace_addresses(word, before, addresses) for word in arguments]
    config.annotations[ownership.ADDRESSES] = ",".join(addresses)


def _make(
    client: Client,
    pod: str,
    sandbox: api.PodSandboxConfig,
    config: api.ContainerConfig,
    attempt: int,
    without_links: Sequence[str],
) -> str:
    """Create and start an attempt of a container, and return its id. `without_links`: destinations
    of the mounts whose host paths must not contain a symbolic link. Raises ServerError; if such a
    path contains a link, the container is removed instead of started."""
    config.metadata.attempt = attempt
    config.log_path = next_log(config.log_path, attempt)
    identifier = client.create_container(pod, config, sandbox)
    try:
        sources.check(client, identifier, config, without_links)
    except ServerError:
        client.remove_container(identifier)
        raise
    client.start_container(identifier)
    return identifier


def _newest(client: Client, pod: api.PodSandbox) -> list[api.Container]:
    """Return the newest attempt of each container of a pod, in the order in which the containers
    were first created."""
    containers = client.containers(pod_sandbox_id=pod.id)
    return latest_attempts(sorted(containers, key=lambda c: c.created_at))


def _main_containers(client: Client, pod: api.PodSandbox) -> list[api.Container]:
    """Return the newest attempt of each container of a pod, without init containers."""
    return [c for c in _newest(client, pod) if ownership.INIT not in c.labels]


def _attempts(client: Client, container: api.Container) -> Sequence[api.Container]:
    containers = client.containers(pod_sandbox_id=container.pod_sandbox_id)
    return [c for c in containers if c.metadata.name == container.metadata.name]


def next_log(path: str, attempt: int) -> str:
    """Derive the log path of an attempt from that of an earlier attempt. kubelet names logs
    `NAME/0.log`; `run` names them `NAME.log`, `NAME.1.log`."""
    folder, name = posixpath.split(path)
    stem = re.sub(r"(^|\.)\d+\.log$|\.log$", "", name)
    return posixpath.join(folder, f"{stem}.{attempt}.log" if stem else f"{attempt}.log")
