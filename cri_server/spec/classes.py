"""The class that annotations give a container, for block I/O and for caches: as containerd and
CRI-O read them (goresctrl)."""

from __future__ import annotations

from collections.abc import Mapping


def of(kind: str, name: str, pod: Mapping[str, str], container: Mapping[str, str]) -> str:
    """The class of `kind` (blockio, rdt) of the container `name`, by its own annotations and its
    pod's; empty for none.

    The nearest annotation counts, and says `none` when it is empty.
    """
    own = f"io.kubernetes.cri.{kind}-class"
    if own in container:
        return container[own]
    of_pods = f"{kind}.resources.beta.kubernetes.io"
    return pod.get(f"{of_pods}/container.{name}", pod.get(f"{of_pods}/pod", ""))
