"""Reads the OCI hooks that the administrator configures in folders of JSON files, and adds those
that apply to a container to its spec.

The format is oci-hooks(5) of podman and CRI-O, schema 1.0.0. A file in a later folder replaces a
file of the same name in an earlier folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from cri_server import typed
from pyrunc.errors import WrongState

SIZE_LIMIT_BYTES = 1 << 20

Stage = Literal[
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
]


class _Entry(msgspec.Struct):
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout: int | None = None


class _When(msgspec.Struct, forbid_unknown_fields=True):
    always: bool | None = None
    annotations: dict[str, str] | None = None
    commands: list[str] | None = None
    has_bind_mounts: bool | None = msgspec.field(default=None, name="hasBindMounts")


class _HookFile(msgspec.Struct):
    version: Literal["1.0.0"]
    hook: _Entry
    when: _When
    stages: list[Stage]


@dataclass(frozen=True, slots=True)
class ConfiguredHook:
    """The content of a hook file. `entry`: the OCI hook; `stages`: the OCI stages that run the
    hook. The other fields are conditions, None where the file does not set them."""

    entry: dict[str, Any]
    stages: tuple[str, ...]
    always: bool | None = None
    annotations: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] | None = None
    commands: tuple[re.Pattern[str], ...] | None = None
    has_bind_mounts: bool | None = None

    def is_for(self, annotations: Mapping[str, str], command: str, bind_mounts: bool) -> bool:
        """Return whether the hook applies to a container: it has conditions, and all of them are
        met."""
        results: list[bool] = []
        if self.always is not None:
            results.append(self.always)
        if self.annotations is not None:
            pairs = annotations.items()
            results += [
                any(k.search(n) and v.search(t) for n, t in pairs) for k, v in self.annotations
            ]
        if self.commands is not None:
            results.append(any(pattern.search(command) for pattern in self.commands))
        if self.has_bind_mounts is not None:
            results.append(not self.has_bind_mounts or bind_mounts)
        return bool(results) and all(results)


def read(folders: Sequence[str]) -> list[ConfiguredHook]:
    """Return the hooks of all JSON files in `folders`, sorted by file name in lower case.

    Raises WrongState for an invalid file, because a container must not start without a hook that
    may apply to it.
    """
    files: dict[str, Path] = {}
    for folder in folders:
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise WrongState(f"cannot list the hooks in {folder}: {error.strerror}") from None
        files |= {name: Path(folder, name) for name in names if name.endswith(".json")}
    return [_read(files[name]) for name in sorted(files, key=lambda name: (name.lower(), name))]


def _read(path: Path) -> ConfiguredHook:
    try:
        with path.open("rb") as file:
            content = file.read(SIZE_LIMIT_BYTES + 1)
        if len(content) > SIZE_LIMIT_BYTES:
            raise ValueError(f"larger than {SIZE_LIMIT_BYTES} bytes")
        hook_file = typed.decode(content, _HookFile)
        if not hook_file.hook.path.startswith("/"):
            raise ValueError(f"hook.path {hook_file.hook.path!r} is not absolute")
        return _hook(hook_file)
    except (OSError, ValueError, RecursionError, re.error) as error:
        raise WrongState(f"hook {path}: {error}") from None


def _hook(file: _HookFile) -> ConfiguredHook:
    entry = {key: value for key, value in msgspec.to_builtins(file.hook).items() if value}
    when = file.when
    return ConfiguredHook(
        entry=entry,
        stages=tuple(dict.fromkeys(file.stages)),
        always=when.always,
        annotations=None
        if when.annotations is None
        else tuple((re.compile(key), re.compile(value)) for key, value in when.annotations.items()),
        commands=None if when.commands is None else tuple(map(re.compile, when.commands)),
        has_bind_mounts=when.has_bind_mounts,
    )


def apply(
    spec: dict[str, Any],
    hooks: Sequence[ConfiguredHook],
    annotations: Mapping[str, str],
    bind_mounts: bool,
) -> None:
    """Add the configured hooks that apply to the container to its OCI spec, after the spec's own
    hooks."""
    command = next(iter(spec["process"]["args"]), "")
    for hook in hooks:
        if hook.is_for(annotations, command, bind_mounts):
            for stage in hook.stages:
                spec.setdefault("hooks", {}).setdefault(stage, []).append(hook.entry)
