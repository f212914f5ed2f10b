"""Checks of the hosts.toml files below [registry] config_path, and of their certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cri_server.doctor.model import CheckResult, Machine, fine, note, warning
from pyrunc.errors import Error

EXAMPLE = "registry.example"  # represents the registries of the folder _default


def registries(host: Machine) -> Iterator[CheckResult]:
    """Check the hosts.toml files: yield a result for each file that has errors or ignored keys, or
    lies in a folder that the server ignores."""
    named = [folder for folder in host.config.registry.config_path.split(":") if folder]
    files = [file for folder in named for file in sorted(host.path(folder).glob("*/hosts.toml"))]
    problems = list(_repeated(host, files))
    for file in files:
        problems += _check_file(host, file)
    yield from problems or [fine("registries", f"{len(files)} files of hosts.toml have no errors")]


def _repeated(host: Machine, files: list[Path]) -> Iterator[CheckResult]:
    """Yield a result for each folder that the server ignores, because another folder names the same
    registry in another spelling."""
    from cri_server.images.registry.hosts import folder_of, registry_of

    for file in files:
        folder, registry = file.parent, registry_of(file.parent.name)
        used = folder_of(registry, [folder.parent])
        if used is not None and used != folder:
            both = f"{_on_machine(host, str(used))} and {_on_machine(host, str(folder))}"
            yield warning(
                "registries",
                f"{both} are for the same registry",
                f"the second one is ignored for {registry}",
                "merge both into the first one, and remove the second",
            )


def _check_file(host: Machine, file: Path) -> Iterator[CheckResult]:
    from cri_server.images.registry.client import tls_context
    from cri_server.images.registry.hosts import DEFAULT_FOLDER, read_file, registry_of

    is_default = file.parent.name == DEFAULT_FOLDER
    registry = EXAMPLE if is_default else registry_of(file.parent.name)
    of = "all registries without their own file" if is_default else registry
    try:
        content = read_file(file, registry, own=not is_default)
    except Error as error:
        effect = f"images of {of} cannot be pulled; other registries work"
        yield _broken(
            host,
            error,
            effect,
            f"correct {_on_machine(host, str(file))}; it is read again for each pull",
        )
        return
    for each in content.hosts:
        try:
            if each.url.startswith("https:"):
                tls_context(each)
        except Error as error:
            effect = f"{each.netloc} is skipped for images of {of}"
            yield _broken(host, error, effect, "correct the file, or its entry in hosts.toml")
    if content.warnings:
        yield note(
            "registries",
            f"{_on_machine(host, str(file))}: {'; '.join(content.warnings)}",
            "the rest of the file is used",
            "see docs/registries.md for the supported keys",
        )


def _broken(host: Machine, error: Error, effect: str, remedy: str) -> CheckResult:
    return warning("registries", _on_machine(host, error.message), effect, remedy)


def _on_machine(host: Machine, text: str) -> str:
    """Remove the prefix `host.top` from the paths in `text`."""
    return text.replace(f"{host.top}/", "/") if host.top != Path("/") else text
