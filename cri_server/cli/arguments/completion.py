"""Shell completion of the names and ids of pods, containers and images from the running server.

Without a server, or if a call takes longer than TIMEOUT_S, there are no candidates. click completes
verbs and options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import click

from pyrunc.errors import Error

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from cri_server.api import api_pb2 as api
    from cri_server.cli.connection.client import Client

    Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
TIMEOUT_S = 2.0  # the shell's prompt waits for the candidates
PROGRAM = "pyrunc-cri"
SHORT = 12  # the same as output.show.SHORT; the import of output.show takes longer


def _containers(client: Client) -> Iterator[tuple[str, str]]:
    from cri_server.api import api_pb2 as api

    names = _shortest(client.call(api.ListPodSandboxRequest(), TIMEOUT_S).items)
    for c in client.call(api.ListContainersRequest(), TIMEOUT_S).containers:
        pod = names.get(c.pod_sandbox_id, "")
        yield c.metadata.name, f"in pod {pod}"
        yield f"{pod}/{c.metadata.name}", c.image.user_specified_image or c.image.image
        yield c.id[:SHORT], f"{pod}/{c.metadata.name}"


def _pods(client: Client) -> Iterator[tuple[str, str]]:
    from cri_server.api import api_pb2 as api

    pods = client.call(api.ListPodSandboxRequest(), TIMEOUT_S).items
    names = _shortest(pods)
    for p in pods:
        yield names[p.id], f"pod in {p.metadata.namespace}"
        yield p.id[:SHORT], p.metadata.name


def _images(client: Client) -> Iterator[tuple[str, str]]:
    from cri_server.api import api_pb2 as api

    for image in client.call(api.ListImagesRequest(), TIMEOUT_S).images:
        identifier = image.id.rpartition(":")[2][:SHORT]
        yield from ((tag, identifier) for tag in image.repo_tags)
        yield identifier, " ".join(image.repo_tags)


def _shortest(pods: Iterable[api.PodSandbox]) -> dict[str, str]:
    """Return {id: name} of the pods. A name is NAMESPACE/NAME if pods in several namespaces have
    it."""
    from cri_server.cli.connection.client import pod_names, shared_names

    pods = list(pods)
    shared = shared_names(pods)
    return {p.id: pod_names(p)[p.metadata.name in shared] for p in pods}


def _completer(*sources: Callable[[Client], Iterator[tuple[str, str]]]) -> Completer:
    """Return a completer that offers the candidates of `sources`, each a word with a description.
    Leaves out the candidates of a source that fails."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from cri_server.cli.connection.client import Client

        candidates: list[tuple[str, str]] = []
        for source in sources:
            with (
                contextlib.suppress(Error),
                Client(context.find_root().params["address"]) as client,
            ):
                candidates.extend(source(client))
        return _offer(candidates, incomplete)

    return complete


# Each completes names; it completes ids only after the user has typed a character.
containers = _completer(_containers)
pods = _completer(_pods)
both = _completer(_pods, _containers)
images = _completer(_images)


def states(*kinds: str) -> Completer:
    """Return a completer for --state. `kinds`: `container` or `pod`."""
    names = (
        ["created", "running", "paused", "exited", "unknown"]
        if "container" in kinds
        else ["ready", "notready"]
    )
    return lambda context, parameter, incomplete: _offer([(name, "") for name in names], incomplete)


def _offer(candidates: list[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """Return the candidates that begin with `incomplete`. Offers ids only if `incomplete` is not
    empty."""
    offered: dict[str, str] = {}
    for word, text in candidates:
        is_id = len(word) == SHORT and not set(word) - set("0123456789abcdef")
        if word.startswith(incomplete) and (incomplete or not is_id):
            offered.setdefault(word, text)
    from click.shell_completion import CompletionItem

    return [CompletionItem(word, help=text or None) for word, text in offered.items()]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell. To load it: eval "$(pyrunc-cri completion bash)"."""
    from cri_server.install import shells

    click.echo(shells.script(shell, PROGRAM, context.find_root().command))
