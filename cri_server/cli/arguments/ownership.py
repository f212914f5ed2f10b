"""Finds out who created a pod (kubelet or `run`), and asks the user before a verb stops or removes
it.

kubelet sets its labels on every pod and container, and a manifest cannot overwrite them. `run` sets
the label MARK. kubelet recreates a pod that a user stops, so the user is asked first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.output.report import report
from cri_server.cli.output.show import printable
from pyrunc.errors import WrongState

KUBELET = "io.kubernetes.pod.uid"
MARK = "io.pyrunc.made-by"
SIDECAR = "io.pyrunc.sidecar"
INIT = "io.pyrunc.init"
# annotation of containers, as kubelet sets it: the ports of the manifest as a JSON list
PORTS = "io.kubernetes.container.ports"
ADDRESSES = "io.pyrunc.pod-ips"  # annotation of containers whose manifest uses status.podIP
GRACE = "io.kubernetes.pod.terminationGracePeriod"  # annotation of containers, as kubelet sets it
RUN = "run"
LISTED_MAX = 20  # names that a question lists


def owner(labels: Mapping[str, str]) -> str:
    """Return who created the pod with these labels: `kubelet`, `run` for `pyrunc-cri run`, or an
    empty string for any other client."""
    return "kubelet" if KUBELET in labels else labels.get(MARK, "")


def permitted(pods: Sequence[api.PodSandbox], *, kubelets: bool) -> list[api.PodSandbox]:
    """Return the pods that --all and --label may act on. Leaves out kubelet's pods unless
    `kubelets` is set, and prints how many it leaves out."""
    selected = [pod for pod in pods if kubelets or owner(pod.labels) != "kubelet"]
    if len(selected) < len(pods):
        report(f"{len(pods) - len(selected)} pods of kubelet are skipped (see --kubelet)")
    return selected


def confirm(verb: str, things: Sequence[str], *, force: bool) -> bool:
    """Ask the user on the terminal before `verb` acts on `things`, and return the answer. Returns
    True without asking if `force` is set or `things` is empty. Raises WrongState if stdin is no
    terminal."""
    if force or not things:
        return True
    if not sys.stdin.isatty():
        raise WrongState(
            f"{verb} {_named(things)}: needs confirmation, but stdin is not a terminal; use --force"
        )
    for each in things[:LISTED_MAX] if len(things) > 1 else ():
        click.echo(f"  {printable(each)}", err=True)
    if len(things) > LISTED_MAX:
        click.echo(f"  … and {len(things) - LISTED_MAX} more", err=True)
    return click.confirm(f"{verb} {_named(things)}?", err=True)


def permit(verb: str, name: str, labels: Mapping[str, str], *, force: bool) -> None:
    """Ask the user before `verb` acts on a pod or container of kubelet's, unless `force` is set.
    Raises WrongState if the user declines, or if stdin is no terminal."""
    if owner(labels) != "kubelet" or force:
        return
    if not sys.stdin.isatty():
        raise WrongState(
            f"{name} belongs to kubelet, which makes it again; use --force to {verb} it"
        )
    if not click.confirm(
        f"{printable(name)} belongs to kubelet, which makes it again: {verb} it?", err=True
    ):
        raise WrongState(f"not confirmed: {name} is unchanged")


def _named(things: Sequence[str]) -> str:
    return printable(things[0]) if len(things) == 1 else f"all {len(things)}"
