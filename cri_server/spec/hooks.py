"""Reads the OCI hooks that the administrator configures in folders of JSON files, and adds to a
container's spec the hooks that apply to the container.

The format is oci-hooks(5) of podman and CRI-O, schema 1.0.0. A file in a later folder replaces a
file of the same name in an earlier folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cri_server import typed
from cri_server.store.facts import entries
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

    def patterns(self) -> Iterator[str]:
        """Yield all regular expressions of the conditions."""
        yield from self.commands or ()
        for pair in (self.annotations or {}).items():
            yield from pair

    def are_met(self, annotations: Mapping[str, str], command: str, bind_mounts: bool) -> bool:
        """Return whether the hook has conditions and the container meets all of them."""
        results: list[bool] = []
        if self.always is not None:
            results.append(self.always)
        if self.annotations is not None:
            pairs = annotations.items()
            results += [
                any(re.search(key, name) and re.search(value, text) for name, text in pairs)
                for key, value in self.annotations.items()
            ]
        if self.commands is not None:
            results.append(any(re.search(pattern, command) for pattern in self.commands))
        if self.has_bind_mounts is not None:
            results.append(not self.has_bind_mounts or bind_mounts)
        return bool(results) and all(results)


class ConfiguredHook(msgspec.Struct):
    """The content of a hook file. `hook`: the OCI hook; `when`: its conditions; `stages`: the OCI
    stages that run the hook."""

    version: Literal["1.0.0"]
    hook: _Entry
    when: _When
    stages: list[Stage]


def read(folders: Sequence[str]) -> list[ConfiguredHook]:
    """Return the hooks of all JSON files in `folders`, sorted by file name in lower case.

    Raises WrongState for an invalid file, because a container must not start without a hook that
    may apply to it.
    """
    files: dict[str, Path] = {}
    for folder in folders:
        try:
            names = entries(folder)
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
        configured = typed.decode(content, ConfiguredHook)
        if not configured.hook.path.startswith("/"):
            raise ValueError(f"hook.path {configured.hook.path!r} is not absolute")
        for pattern in configured.when.patterns():
            re.compile(pattern)
        return configured
    except (OSError, ValueError, RecursionError, re.error) as error:
        raise WrongState(f"hook {path}: {error}") from None


def apply(
    spec: dict[str, Any],
    hooks: Sequence[ConfiguredHook],
    annotations: Mapping[str, str],
    bind_mounts: bool,
) -> None:
    """Append the configured hooks that apply to a container to the hooks in its OCI spec."""
    command = next(iter(spec["process"]["args"]), "")
    for hook in hooks:
        if hook.when.are_met(annotations, command, bind_mounts):
            fields = msgspec.to_builtins(hook.hook)
            entry = {key: value for key, value in fields.items() if value}
            for stage in dict.fromkeys(hook.stages):
                spec.setdefault("hooks", {}).setdefault(stage, []).append(entry)
