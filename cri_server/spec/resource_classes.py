"""Reads the files of block I/O and RDT classes, and selects a container's class by the annotations
that containerd and CRI-O read (goresctrl)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from cri_server import typed

SIZE_LIMIT_BYTES = 1 << 20
ClassFile = TypeVar("ClassFile")


def find(kind: str, name: str, pod: Mapping[str, str], container: Mapping[str, str]) -> str:
    """Return the class that annotations assign to the container `name`; empty for none.

    `kind`: blockio or rdt; `pod`, `container`: the annotations of the pod and of the container. A
    container's own annotation comes first, then the pod's for this container, then the pod's for
    all containers. An empty annotation selects no class.
    """
    container_key = f"io.kubernetes.cri.{kind}-class"
    if container_key in container:
        return container[container_key]
    pod_key = f"{kind}.resources.beta.kubernetes.io"
    return pod.get(f"{pod_key}/container.{name}", pod.get(f"{pod_key}/pod", ""))


def read(path: str, form: type[ClassFile]) -> ClassFile:
    """Read a YAML file of classes into an object of class `form`. Raises OSError if the file cannot
    be read, ValueError if it is too large or invalid."""
    import yaml  # takes 20 ms to import, and few servers need it

    with open(path, "rb") as file:
        content = file.read(SIZE_LIMIT_BYTES + 1)
    if len(content) > SIZE_LIMIT_BYTES:
        raise ValueError(f"larger than {SIZE_LIMIT_BYTES} bytes")
    try:
        return typed.convert(yaml.safe_load(content) or {}, form)
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from None
