"""Whose a pod is, and the questions that are asked before something is stopped or removed.

kubelet puts its labels on every pod and container that it makes, over what the pod's author wrote;
a pod of `run` has our mark. What kubelet made it makes again: to stop it by hand is rarely what was
meant.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.output.show import printable
from pyrunc.errors import WrongState

KUBELET = "io.kubernetes.pod.uid"
MARK = "io.pyrunc.made-by"
SIDECAR = "io.pyrunc.sidecar"
INIT = "io.pyrunc.init"
# annotation of containers, as kubelet sets it: a JSON list of the manifest's
PORTS = "io.kubernetes.container.ports"
ADDRESSES = "io.pyrunc.pod-ips"  # annotation of containers whose manifest uses status.podIP
GRACE = "io.kubernetes.pod.terminationGracePeriod"  # annotation of containers, as kubelet sets it
RUN = "run"
SHOWN = 20


def owner(labels: Mapping[str, str]) -> str:
    """`kubelet`, `run` for what `pyrunc-cri run` made, else nothing."""
    return "kubelet" if KUBELET in labels else labels.get(MARK, "")


def spare(found: Sequence[api.PodSandbox], *, kubelets: bool) -> list[api.PodSandbox]:
    """The pods that --all means: without kubelet's unless these are asked for; how many are spared
    is said."""
    kept = [pod for pod in found if kubelets or owner(pod.labels) != "kubelet"]
    if len(kept) < len(found):
        click.echo(
            f"pyrunc-cri: {len(found) - len(kept)} pods of kubelet's stay (--kubelet takes them, too)",
            err=True,
        )
    return kept


def confirm(verb: str, things: Sequence[str], *, force: bool) -> bool:
    """Whether the user wants this: --force says so, and on a terminal it is asked. Raises
    WrongState where it cannot be."""
    if force or not things:
        return True
    if not sys.stdin.isatty():
        raise WrongState(
            f"{verb} {_named(things)}: there is no terminal to ask at; --force does not ask"
        )
    for each in things[:SHOWN] if len(things) > 1 else ():
        click.echo(f"  {printable(each)}", err=True)
    if len(things) > SHOWN:
        click.echo(f"  … and {len(things) - SHOWN} more", err=True)
    return click.confirm(f"{verb} {_named(things)}?", err=True)


def permit(verb: str, name: str, labels: Mapping[str, str], *, force: bool) -> None:
    """Ask before something of kubelet's is touched that was named. Raises WrongState when it is not
    wanted."""
    if owner(labels) != "kubelet" or force:
        return
    if not sys.stdin.isatty():
        raise WrongState(
            f"{name} is kubelet's, which makes it again: --force to {verb} it nevertheless"
        )
    if not click.confirm(
        f"{printable(name)} is kubelet's, which makes it again: {verb} it?", err=True
    ):
        raise WrongState(f"{name} stays")


def _named(things: Sequence[str]) -> str:
    return printable(things[0]) if len(things) == 1 else f"all {len(things)}"
