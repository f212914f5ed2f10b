"""Selects a container's block I/O or RDT class by the annotations that containerd and CRI-O read
(goresctrl)."""

from __future__ import annotations

from collections.abc import Mapping


def find(kind: str, name: str, pod: Mapping[str, str], container: Mapping[str, str]) -> str:
    """The class of `kind` (blockio, rdt) of the container `name` by its own and its pod's
    annotations; empty for none.

    The most specific annotation applies; an empty one selects no class."""
    container_key = f"io.kubernetes.cri.{kind}-class"
    if container_key in container:
        return container[container_key]
    pod_key = f"{kind}.resources.beta.kubernetes.io"
    return pod.get(f"{pod_key}/container.{name}", pod.get(f"{pod_key}/pod", ""))
