"""`pyrunc-cri run POD.YAML`: runs the pod of a manifest, and prints addresses, processes,
namespaces, cgroups, first output, and the duration of each step."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments.files import FILE
from cri_server.cli.connection.client import Client, ServerError
from cri_server.cli.containers import sources, stop
from cri_server.cli.containers.wait import wait_exit
from cri_server.cli.images import credentials, transfer
from cri_server.cli.manifest import folders, host_names, pod_model, read, translate, volumes
from cri_server.cli.output import show
from cri_server.cli.output.report import report
from cri_server.cli.streams import log_lines, logs
from pyrunc.cli.log import describe_error
from pyrunc.errors import AlreadyExists, Error

FIRST_OUTPUT_S = 0.3
LINES = 10


@dataclass(slots=True)
class Running:
    """A pod that `run` has started. `containers`: {name: id}; `times`: each step's name and its
    duration in milliseconds."""

    name: str
    folder: Path
    id: str = ""
    containers: dict[str, str] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    # names of init containers that run beside the others
    sidecars: set[str] = field(default_factory=set)
    times: list[tuple[str, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Run the `with` block, and add its duration in milliseconds to `times` under the name
        `step`."""
        began = time.perf_counter()
        yield
        self.times.append((step, (time.perf_counter() - began) * 1e3))


@click.command()
@click.argument("files", type=FILE, nargs=-1, required=True, metavar="POD.YAML...")
@click.option(
    "--rm", "remove", is_flag=True, help="Follow the output, and remove the pod after its end."
)
@click.option(
    "--lenient",
    is_flag=True,
    help="Ignore unknown and unsupported fields with a warning.",
)
@folders.option("The folder for logs and volumes of pods.")
@click.pass_obj
def run(address: str, files: tuple[Path, ...], remove: bool, lenient: bool, folder: Path) -> None:
    """Run the pod of a manifest. ConfigMaps and Secrets may be in the same file or in others; `-`
    is stdin. Containers are not restarted, and probes are not executed.

    With --rm the exit code is that of the first container in the manifest that failed, or 0 if no
    container failed.
    """
    pod = load(*files, lenient=lenient)
    with Client(address) as client:
        running = start(client, pod, folder)
        if not remove:
            describe(client, running)
            return
        try:
            describe(client, running)
            follow(client, running)
            code = exit_code(client, running)
        finally:
            clean_up(client, running, pod.spec.termination_grace_period_seconds)
    sys.exit(code)


def load(*files: Path, lenient: bool = False) -> pod_model.PodManifest:
    """Read the pod's manifest from files. With `lenient`, unsupported fields cause a warning on
    stderr instead of an error. Raises InvalidSpec."""
    pod, ignored = read.read(*files, lenient=lenient)
    for line in ignored:
        report(f"warning: ignored {line}")
    return pod


def start(client: Client, pod: pod_model.PodManifest, folder: Path) -> Running:
    """Start a pod: the sandbox, the init containers one after the other, then the containers.
    Creates the pod's folder below `folder`. If a step fails, removes the pod and its folder as
    `clean_up` does.

    Raises AlreadyExists if a pod with this name exists."""
    refuse_twin(client, pod)
    running = Running(
        pod.metadata.name, folders.make(folder, pod.metadata.namespace, pod.metadata.name)
    )
    try:
        volumes.prepare(pod, running.folder)
        images = find_images(client, pod, running)
        config = run_sandbox(client, pod, running)
        running.addresses = addresses(client, running.id)
        if pod.spec.host_aliases or not pod.spec.host_network:
            host_names.write(pod.spec, config.hostname, running.addresses, running.folder)
        for each in pod.spec.init_containers:
            launch(client, pod, each, images[each.image], config, running)
            if each.restart_policy:
                running.sidecars.add(each.name)
            else:
                with running.timed(f"init {each.name}"):
                    wait_init(client, running.containers[each.name], each.name)
        for each in pod.spec.containers:
            launch(client, pod, each, images[each.image], config, running)
    except BaseException:
        clean_up(client, running, 0)
        raise
    return running


def refuse_twin(client: Client, pod: pod_model.PodManifest) -> None:
    """Raise AlreadyExists if a pod with the same name and namespace exists, running or not."""
    for each in client.pods():
        metadata = pod.metadata
        if (each.metadata.namespace, each.metadata.name) == (metadata.namespace, metadata.name):
            state = show.POD_STATES.get(each.state, "?")
            identifier = each.id[: show.SHORT]
            force = "-f " if each.state == api.SANDBOX_READY else ""
            raise AlreadyExists(
                f"pod {metadata.namespace}/{metadata.name} exists: {identifier}, {state}"
                f" (pyrunc-cri rm {force}{identifier} removes it)"
            )


def run_sandbox(
    client: Client, pod: pod_model.PodManifest, running: Running
) -> api.PodSandboxConfig:
    """Start the pod's sandbox, add its id to `running`, and return its configuration. A lock
    prevents two `run` from starting the same pod. Raises AlreadyExists if a pod with this name
    exists."""
    config = translate.sandbox(pod, running.folder)
    # The server refuses a second pod only if its uid and attempt are equal, too, and each `run`
    # chooses a new uid. Without the lock, two `run` at the same time would both find no twin.
    with running.timed("run sandbox"), folders.locked(running.folder.parent):
        refuse_twin(client, pod)
        running.id = client.run_pod(config, "")
    folders.set_owner(running.folder, running.id)
    return config


def addresses(client: Client, pod: str) -> list[str]:
    """Return the addresses of the pod with this id; an empty list with host networking."""
    network = client.pod_status(pod).status.network
    return [ip for ip in (network.ip, *(a.ip for a in network.additional_ips)) if ip]


def find_images(
    client: Client, pod: pod_model.PodManifest, running: Running
) -> dict[str, api.Image]:
    """Return {name in the manifest: image} for the images of all containers. Pulls images as the
    imagePullPolicy says. Raises ServerError.

    A name that begins with `/` is the path of a checkpoint archive; the server reads that file."""
    images_by_name: dict[str, api.Image] = {}
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        reference = container.image
        if reference in images_by_name:
            continue
        if reference.startswith("/"):  # a checkpoint, which the server reads
            images_by_name[reference] = api.Image(id=reference)
            continue
        policy = container.image_pull_policy
        response = client.image_status(reference)
        if policy == "Never" and not response.HasField("image"):
            raise ServerError(
                f"image {reference!r} is not on this node, and imagePullPolicy is Never"
            )
        if policy == "Always" or not response.HasField("image"):
            with running.timed(f"pull {reference}"):
                name = transfer.fetch(client, reference, credentials.find(reference))
                response = client.image_status(name)
        if not response.HasField("image"):
            raise ServerError(f"image {reference!r} was removed while it was pulled")
        images_by_name[reference] = response.image
    return images_by_name


def launch(
    client: Client,
    pod: pod_model.PodManifest,
    container: pod_model.ContainerManifest,
    image: api.Image,
    sandbox: api.PodSandboxConfig,
    running: Running,
) -> None:
    """Create and start one container, and add its id to `running`. Raises ServerError; its message
    names the container."""
    with _errors_of(container):
        config = translate.container(pod, container, image, running.folder, running.addresses)
        with running.timed(f"create {container.name}"):
            identifier = client.create_container(running.id, config, sandbox)
        running.containers[container.name] = identifier
        places = [m.mount_path for m in container.volume_mounts if m.sub_path or m.sub_path_expr]
        # Between create and start the mounts exist, and no process has seen them yet.
        sources.check(client, identifier, config, places)
        with running.timed(f"start {container.name}"):
            client.start_container(identifier)


@contextlib.contextmanager
def _errors_of(container: pod_model.ContainerManifest) -> Iterator[None]:
    """Add the container's name to the message of a ServerError that the `with` block raises, unless
    the message names the container already."""
    try:
        yield
    except ServerError as error:
        named = f"container {container.name}"
        if named in error.message:
            raise
        raise ServerError(f"{named}: {error.message}") from None


def wait_init(client: Client, identifier: str, name: str) -> None:
    """Wait until an init container has exited. Raises ServerError with its last output if its exit
    code is not 0."""
    status = wait_exit(client, identifier)
    if status.exit_code:
        output = "".join(f"\n  {line}" for line in list(output_lines(status.log_path))[-LINES:])
        raise ServerError(
            f"init container {name} exited with code {status.exit_code} ({status.reason}){output}"
        )


def describe(client: Client, running: Running) -> None:
    """Print the pod: addresses, processes, containers, and the durations of the steps."""
    info = client.pod_info(running.id)
    ips = " ".join(running.addresses)
    click.echo(f"pod {running.name}  {running.id[: show.SHORT]}  {ips or 'host network'}")
    time.sleep(FIRST_OUTPUT_S)
    pids_by_name = [("shim", info.get("shimPid", 0)), ("pause", info.get("pid", 0))]
    pids = {n: client.container_info(i).get("pid", 0) for n, i in running.containers.items()}
    statuses = {n: client.container_status(i).status for n, i in running.containers.items()}
    pids_by_name += [
        (n, pid) for n, pid in pids.items() if statuses[n].state == api.CONTAINER_RUNNING
    ]
    click.echo("processes")
    click.echo("\n".join(show.processes([(n, p) for n, p in pids_by_name if p])))
    for name, identifier in running.containers.items():
        describe_container(name, identifier, statuses[name], pids[name])
    click.echo("times")
    for step, milliseconds in running.times:
        click.echo(f"{milliseconds:>8.1f} ms  {step}")
    click.echo(f"{sum(ms for _, ms in running.times):>8.1f} ms  in all")


def describe_container(name: str, identifier: str, status: api.ContainerStatus, pid: int) -> None:
    """Print a container: state, namespaces, cgroup, exit code and first lines of output."""
    click.echo(
        f"container {name}  {identifier[: show.SHORT]}  {show.STATES.get(status.state, '?')}"
    )
    if status.state == api.CONTAINER_RUNNING:
        click.echo(f"  namespaces  {show.namespaces(pid)}")
        click.echo(f"  cgroup      {show.cgroup(pid)}")
    if status.state == api.CONTAINER_EXITED:
        click.echo(f"  exit code   {status.exit_code} ({status.reason})")
    lines = list(itertools.islice(output_lines(status.log_path), LINES + 1))
    if lines:
        click.echo("  output")
        click.echo("\n".join(f"    {show.printable(line)}" for line in lines[:LINES]))
    if len(lines) > LINES:
        click.echo(f"    … (the rest: pyrunc-cri logs {identifier[: show.SHORT]})")


def output_lines(path: str) -> Iterator[str]:
    """Yield the lines of a container's log file as text, without timestamps. Yields nothing if the
    file cannot be read."""
    try:
        with open(path, "rb") as file:
            for entry in log_lines.entries(file):
                yield entry.content.decode(errors="replace").rstrip("\n")
    except OSError:
        return


def follow(client: Client, running: Running) -> None:
    """Print the output of the pod's containers until all of them, except sidecars, have ended.
    Raises KeyboardInterrupt."""
    click.echo("--- output; interrupt to stop and remove the pod")
    names = dict.fromkeys(running.containers.values(), "")
    sidecars = {running.containers[name] for name in running.sidecars}
    logs.show(client, names, logs.Writer(), following=True, sidecars=sidecars)


def exit_code(client: Client, running: Running) -> int:
    """Return the exit code of the first container that failed, or 0. Sidecars do not count."""
    own = [each for name, each in running.containers.items() if name not in running.sidecars]
    codes = [client.container_status(container).status.exit_code for container in own]
    return next((code for code in codes if code), 0)


def discard(client: Client, pod: str, grace_s: int) -> bool:
    """Stop and remove a pod, and return whether it was removed. Prints an error instead of raising
    it."""
    try:
        stop.remove_pod(client, pod, grace_s)
    except Error as error:
        report(f"pod {pod} could not be removed: {error}")
        return False
    return True


def clean_up(client: Client, running: Running, grace_s: int) -> None:
    """Stop and remove the pod, then delete its folder. Keeps the folder if the pod cannot be
    removed. Prints errors instead of raising them."""
    if running.id and not discard(client, running.id, grace_s):
        return
    try:
        folders.delete(running.folder)
    except OSError as error:
        report(f"{running.folder} could not be removed: {describe_error(error)}")
