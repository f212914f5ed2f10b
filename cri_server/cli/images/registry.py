"""`pyrunc-cri registry explain IMAGE`: shows the hosts that an image would be pulled from, and the
login for each. Does not access the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from cri_server.cli.arguments.files import FILE
from cri_server.cli.images import credentials
from cri_server.images.formats.reference import Reference
from cri_server.images.model import Auth
from cri_server.images.registry.auth import may_receive
from cri_server.images.registry.hosts import RegistryHost, folder_of, hosts_for

PULL_SECRET = Auth(username="user")  # without a host, as kubelet's pull secrets


@click.group()
def registry() -> None:
    """Show the registries and mirrors that are configured on this machine."""


@registry.command()
@click.argument("image", metavar="IMAGE")
@click.option("--config", type=FILE, help="The server's TOML file.")
@click.option(
    "--authfile",
    type=click.Path(path_type=Path),
    help="The file of logins for `pull`, instead of the usual ones.",
)
def explain(image: str, config: Path | None, authfile: Path | None) -> None:
    """Show the files that configure the registry of IMAGE, its hosts in order, and the credentials
    for each."""
    from cri_server.config import load_with_origins

    reference = Reference.parse(image)
    loaded = load_with_origins(config, {})
    config_path = loaded.config.registry.config_path
    folders = [Path(folder) for folder in config_path.split(":") if folder]
    click.echo(f"image: {reference}")
    click.echo(
        f"config_path: {config_path or 'none'} ({loaded.origin(('registry', 'config_path'))})"
    )
    for line in _files(reference, folders):
        click.echo(f"read: {line}")
    for number, host in enumerate(hosts_for(reference.registry, folders), 1):
        click.echo(f"{number}. {host.url}{host.prefix}/{host.repository(reference.path)}")
        for about in _about(host, reference):
            click.echo(f"   {about}")
    for line in _signatures(loaded.config.registry.signature_policy, reference):
        click.echo(f"signatures: {line}")
    place = credentials.source(image, authfile)
    click.echo(f"`pyrunc-cri pull` without --creds: {place or 'no login'}")


def _files(reference: Reference, folders: list[Path]) -> Iterator[str]:
    folder = folder_of(reference.registry, folders)
    if folder is None:
        yield "no file"
    elif (folder / "hosts.toml").exists():
        yield str(folder / "hosts.toml")
    else:
        names = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".crt", ".cert", ".key")
        )
        yield f"{folder}: {', '.join(names) or 'nothing'}"


def _about(host: RegistryHost, reference: Reference) -> Iterator[str]:
    capabilities = " and ".join(sorted(host.capabilities)) or "do nothing"
    yield f"{'the registry' if host.upstream else 'mirror'}: may {capabilities}"
    if host.rewrites:
        yield f"rewrite: {reference.path} is {host.repository(reference.path)} there"
    if host.proxy is not None:
        yield f"proxy: {host.proxy.url}"
    if host.skip_verify:
        yield "TLS: not verified"
    for name in host.ca:
        yield f"TLS: authority {name}"
    for certificate, _ in host.client:
        yield f"TLS: client certificate {certificate}"
    if host.headers:
        yield f"headers: {', '.join(sorted(host.headers))}"
    yield f"pull secrets: {_pull_secrets(host, reference)}"
    if host.auth is not None and not host.auth.empty:
        yield f"without one: auth of {host.source}"


def _signatures(path: str, reference: Reference) -> Iterator[str]:
    if not path:
        yield "not checked"
        return
    from cri_server.images.signatures import policy

    scope, requirements = policy.read(path).requirements(reference)
    for requirement in requirements:
        keys = [*filter(None, [requirement.key_path]), *requirement.key_paths]
        identity = requirement.signed_identity.type
        signed = ""
        if requirement.type == policy.SIGNED:
            signed = f" by {', '.join(keys) or 'a key in the policy'}, {identity}"
        yield f"{requirement.type}{signed} ({path}, {scope})"


def _pull_secrets(host: RegistryHost, reference: Reference) -> str:
    if may_receive(PULL_SECRET, reference, host):
        return f"those for {reference.registry}"
    if not host.trusted:
        reason = f"hosts.toml of {reference.registry} does not permit others"
    else:
        reason = "the connection is not encrypted"
    return f"only those for {host.netloc}: {reason}"
