"""Registries: the files of hosts.toml below [registry] config_path, and their certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cri_server.doctor.model import Finding, Host, Level, fine
from pyrunc.errors import Error

EXAMPLE = "registry.example"  # stands for the registries that _default is for


def registries(host: Host) -> Iterator[Finding]:
    """Each hosts.toml that cannot be used, or has keys that are ignored."""
    named = [folder for folder in host.config.registry.config_path.split(":") if folder]
    files = [file for folder in named for file in sorted(host.path(folder).glob("*/hosts.toml"))]
    problems = list(_repeated(host, files))
    for file in files:
        problems += _look(host, file)
    yield from problems or [
        fine("registries", f"{len(files)} files of hosts.toml are as they should be")
    ]


def _repeated(host: Host, files: list[Path]) -> Iterator[Finding]:
    """Folders for other spellings of a registry that has a folder: one of them is read."""
    from cri_server.images.registry.hosts import folder_of, registry_of

    for file in files:
        folder, registry = file.parent, registry_of(file.parent.name)
        used = folder_of(registry, [folder.parent])
        if used is not None and used != folder:
            both = f"{_shown(host, str(used))} and {_shown(host, str(folder))}"
            yield Finding(
                "registries",
                Level.WARNING,
                f"{both} are for one registry",
                f"the second is not read for {registry}",
                "put what both say into the first, and remove the second",
            )


def _look(host: Host, file: Path) -> Iterator[Finding]:
    from cri_server.images.registry.client import tls_context
    from cri_server.images.registry.hosts import DEFAULT_FOLDER, read_file, registry_of

    is_default = file.parent.name == DEFAULT_FOLDER
    registry = EXAMPLE if is_default else registry_of(file.parent.name)
    of = "all registries without a file of their own" if is_default else registry
    try:
        content = read_file(file, registry, own=not is_default)
    except Error as error:
        effect = f"images of {of} cannot be pulled; other registries are not concerned"
        yield _broken(
            host, error, effect, f"mend {_shown(host, str(file))}; it is read again with each pull"
        )
        return
    for each in content.hosts:
        try:
            if each.url.startswith("https:"):
                tls_context(each)
        except Error as error:
            effect = f"{each.netloc} is not asked about images of {of}"
            yield _broken(host, error, effect, "mend the file, or what hosts.toml says of it")
    if content.warnings:
        yield Finding(
            "registries",
            Level.NOTE,
            f"{_shown(host, str(file))}: {'; '.join(content.warnings)}",
            "the rest of the file is used",
            "see docs/registries.md for the keys that are known",
        )


def _broken(host: Host, error: Error, effect: str, remedy: str) -> Finding:
    return Finding("registries", Level.WARNING, _shown(host, error.message), effect, remedy)


def _shown(host: Host, text: str) -> str:
    """The text with the machine's paths."""
    return text.replace(f"{host.top}/", "/") if host.top != Path("/") else text
