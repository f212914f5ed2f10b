"""Reads a manifest and returns a checked Pod. A field that `run` would ignore is an error, or with
`lenient` a warning."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from cri_server.cli.manifest import check, config_maps, document, fields, pod_model
from pyrunc.errors import InvalidSpec


def read(*paths: Path, lenient: bool = False) -> tuple[pod_model.PodManifest, list[str]]:
    """Read several files as one manifest; `-` is stdin. Returns the pod, and a line for each
    ignored field. Raises InvalidSpec; its message names the files."""
    text = "\n---\n".join(map(_text, paths))
    try:
        return parse(text, lenient=lenient)
    except InvalidSpec as error:
        files = ", ".join("stdin" if str(path) == "-" else str(path) for path in paths)
        path = f"{files}: {error.path}" if error.path else files
        raise InvalidSpec(path, error.detail) from None


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSpec(
            str(path), f"cannot be read: {os.strerror(error.errno or 0).lower()}"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidSpec(str(path), f"not YAML: {error}") from None


def parse(text: str, *, lenient: bool = False) -> tuple[pod_model.PodManifest, list[str]]:
    """Parse a manifest in YAML or JSON. Returns the pod, and a line for each ignored field. Raises
    InvalidSpec for an invalid manifest and, without `lenient`, for a field that `run` would
    ignore."""
    manifest, others = document.parse(text)
    metadata = manifest.get("metadata")
    namespace = metadata.get("namespace", "default") if isinstance(metadata, dict) else "default"
    unused = config_maps.resolve(manifest, config_maps.Objects(others, namespace), lenient=lenient)
    ignored = list(fields.problems(manifest))
    if ignored and not lenient:
        raise InvalidSpec("", "\n".join(ignored) + " (--lenient ignores it)")
    if lenient:
        _empty_volumes(manifest)
    ignored = unused + ignored
    try:
        pod = msgspec.convert(manifest, pod_model.PodManifest)
    except msgspec.ValidationError as error:
        raise _to_error(error) from None
    check.pod(pod)
    return pod, ignored


def _empty_volumes(pod: dict[str, Any]) -> None:
    """Replace volumes of unsupported kinds by empty ones, so that containers can mount them."""
    sources = {"hostPath", "emptyDir", config_maps.FILES}
    spec = pod.get("spec")
    for volume in (spec.get("volumes") or []) if isinstance(spec, dict) else []:
        if isinstance(volume, dict) and not sources & volume.keys():
            volume["emptyDir"] = {}


def _to_error(error: msgspec.ValidationError) -> InvalidSpec:
    text, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        return InvalidSpec(f"{path}.{missing[1]}".lstrip("."), "is required")
    return InvalidSpec(path, text[:1].lower() + text[1:])
