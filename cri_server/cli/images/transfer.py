"""`pyrunc-cri pull`, `push`, `load`, `save`, `tag`, `login`, `logout`: images come and go.

A pull is CRI's own call; where a terminal wants to see how far it is, our server's. The others need
our server.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client, Unsupported
from cri_server.cli.images import credentials
from cri_server.cli.output.complaint import each
from cri_server.cli.output.progress import Progress
from cri_server.images.formats.reference import Reference
from cri_server.rpc import private
from pyrunc.errors import Error, InvalidArgument, NotFound

CHUNK_BYTES = 1 << 16
WAIT_S = 0.1

authfile = click.option(
    "--authfile", type=click.Path(path_type=Path), metavar="FILE", help="Where logins are kept."
)
creds = click.option("--creds", metavar="USER[:PASSWORD]", help="The login for this call.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")


@click.command()
@click.argument(
    "references", nargs=-1, required=True, metavar="IMAGE...", shell_complete=completion.images
)
@creds
@authfile
@quiet_option
@click.option(
    "--platform",
    metavar="OS/ARCH[/VARIANT]",
    callback=lambda context, option, value: _parse_platform(value),
    help="The image for this platform instead of the one that suits the processor best.",
)
@click.pass_obj
def pull(
    address: str,
    references: tuple[str, ...],
    creds: str | None,
    authfile: Path | None,
    quiet: bool,
    platform: str | None,
) -> None:
    """Fetch images from their registries."""
    with Client(address) as client:

        def act(name: str) -> None:
            auth = _login(name, creds, authfile)
            if platform is None:
                click.echo(fetch(client, name, auth, quiet=quiet))
                return
            request = private.PullPlatform(name, platform, _fields(auth))
            click.echo(_told(client, request, f"pulling {name}", quiet=quiet))

        each(references, act)


def _parse_platform(text: str | None) -> str | None:
    """Also warns of a platform that this machine does not run. Raises click.BadParameter."""
    if text is None:
        return None
    from cri_server.images.formats import platforms

    try:
        platform = platforms.parse(text)
    except InvalidArgument as error:
        raise click.BadParameter(error.message) from None
    if platforms.rank(platform, platforms.host_processors()) is None:
        warning = f"the processor does not run images for {platform} without binfmt_misc(5)"
        click.echo(f"pyrunc-cri: {warning}", err=True)
    return str(platform)


def fetch(
    client: Client, reference: str, auth: api.AuthConfig | None = None, *, quiet: bool = False
) -> str:
    """Pull; the image's id. On a terminal it is seen how far it is, where the server can tell."""
    if sys.stderr.isatty() and not quiet:
        with contextlib.suppress(Unsupported):
            return _told(
                client, private.PullImage(reference, _fields(auth)), f"pulling {reference}"
            )
    request = api.PullImageRequest(image=api.ImageSpec(image=reference), auth=auth)
    return str(client.image("PullImage", request, None).image_ref)


def _fields(auth: api.AuthConfig | None) -> dict[str, str]:
    return {} if auth is None else {field.name: value for field, value in auth.ListFields()}


def _told(
    client: Client,
    asked: private.PullImage | private.PullPlatform | private.PushImage,
    label: str,
    *,
    quiet: bool = False,
) -> str:
    with Progress(label, quiet=quiet) as progress:
        for told in client.admin_stream(asked, private.decoder(private.TransferUpdate)):
            if told.id is not None:
                return told.id
            if told.progress is not None:
                progress.set(
                    told.progress.fetched_bytes, told.progress.total_bytes, told.progress.stage
                )
    raise Error(f"{label}: the server said nothing at the end")


def _login(reference: str, given: str | None, chosen: Path | None) -> api.AuthConfig | None:
    if given is not None:
        return credentials.given(given, Reference.parse(reference).registry)
    return credentials.find(reference, chosen)


@click.command()
@click.argument("image", shell_complete=completion.images)
@click.argument("target", required=False, metavar="[NAME]")
@creds
@authfile
@click.pass_obj
def push(
    address: str, image: str, target: str | None, creds: str | None, authfile: Path | None
) -> None:
    """Send IMAGE to the registry that its name, or NAME, has."""
    target = target or image
    with Client(address) as client:
        asked = private.PushImage(image, target, _fields(_login(target, creds, authfile)))
        click.echo(_told(client, asked, f"pushing {target}"))


@click.command()
@click.argument("source", metavar="IMAGE", shell_complete=completion.images)
@click.argument("targets", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def tag(address: str, source: str, targets: tuple[str, ...]) -> None:
    """Give IMAGE another name."""
    with Client(address) as client:

        def act(name: str) -> None:
            client.admin(private.TagImage(source, name), private.Empty)

        each(targets, act)


@click.command(short_help="Write images as an archive for docker, podman, skopeo, load")
@click.argument(
    "images", nargs=-1, required=True, metavar="IMAGE...", shell_complete=completion.images
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Instead of stdout."
)
@quiet_option
@click.pass_obj
def save(address: str, images: tuple[str, ...], output: Path | None, quiet: bool) -> None:
    """Write images as an archive that docker, podman, skopeo and `load` read."""
    if output is None and sys.stdout.isatty():
        raise InvalidArgument("an archive is not for a terminal: redirect stdout, or use -o FILE")
    with (
        Client(address) as client,
        _written(output) as file,
        Progress("saving", quiet=quiet) as progress,
    ):
        for part in client.admin_stream(private.SaveImages(list(images)), bytes):
            file.write(part)
            progress.add(len(part))


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[BinaryIO]:
    """A file that appears when it is whole; or stdout. The folder may be somebody else's: of his
    links none is followed."""
    if path is None:
        yield sys.stdout.buffer
        return
    special = path.exists() and not path.is_file()
    # such as /dev/stdout
    if special and (not path.is_symlink() or path.absolute().is_relative_to("/dev")):
        with open(path, "wb") as file:
            yield file
        return
    growing = path.with_name(f".{os.urandom(8).hex()}.part")
    with open(growing, "xb") as file:
        try:
            yield file
            file.flush()
            growing.rename(path)
        except BaseException:
            growing.unlink(missing_ok=True)
            raise


@click.command(short_help="Import an archive of images from FILE or stdin")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path, readable=False), metavar="[FILE|-]"
)
@click.option(
    "-i",
    "--input",
    "given",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="The same as FILE.",
)
@click.option("--name", help="For an archive's only image when it has no name of its own.")
@quiet_option
@click.pass_obj
def load(
    address: str, file: Path | None, given: Path | None, name: str | None, quiet: bool
) -> None:
    """Import FILE, or with `-` or nothing stdin: a docker-archive or an OCI archive, plain or
    compressed."""
    if file is not None and given is not None:
        raise click.UsageError("FILE and --input exclude each other")
    path = file or given or Path("-")
    with Client(address) as client:
        for found in _load(client, path, name, quiet=quiet):
            click.echo(f"{found.id}  {' '.join(found.repo_tags)}")


def _load(
    client: Client, path: Path, name: str | None, *, quiet: bool
) -> Sequence[private.LoadedImage]:
    if str(path) == "-":
        if sys.stdin.isatty():
            raise InvalidArgument("no archive: name a file, or redirect stdin")
        return _fed(client, sys.stdin.buffer, "stdin", name, Progress("loading", quiet=quiet))
    with open(path, "rb") as file:  # the server may read what its client may not
        if not sys.stderr.isatty() or quiet:
            return client.load_image(str(path.resolve()), name)
        total = os.fstat(file.fileno()).st_size
        return _fed(client, file, str(path), name, Progress(f"loading {path.name}", total))


def _fed(
    client: Client, source: BinaryIO, label: str, name: str | None, progress: Progress
) -> Sequence[private.LoadedImage]:
    """The server reads a pipe that we fill: it comes to its end, also when we are killed."""
    outcome: list[Any] = []

    def call(path: str) -> None:
        try:
            outcome.append(client.load_image(path, name))
        except Error as error:
            error.message = error.message.replace(path, label)
            error.args = (error.message,)
            outcome.append(error)

    with tempfile.TemporaryDirectory(prefix="pyrunc-load-") as folder:
        path = f"{folder}/archive"
        os.mkfifo(path, 0o600)
        # opened for both: the server's open(2) never waits for us, nor ours for it
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        thread = threading.Thread(target=call, args=(path,), daemon=True)
        thread.start()
        with progress:
            try:
                _fill(pipe, source, progress, thread.is_alive)
            finally:
                os.close(pipe)
            progress.at("unpacking")
            thread.join()
    if isinstance(outcome[0], Error):
        raise outcome[0]
    found: Sequence[private.LoadedImage] = outcome[0]
    return found


def _fill(pipe: int, source: BinaryIO, progress: Progress, is_read: Callable[[], bool]) -> None:
    """Until the source ends, or nobody reads any more."""
    while part := source.read(CHUNK_BYTES):
        view = memoryview(part)
        while view:
            if not is_read():
                return
            try:
                view = view[os.write(pipe, view) :]
            except BlockingIOError:
                select.select([], [pipe], [], WAIT_S)
        progress.add(len(part))
    while is_read() and select.select([pipe], [], [], 0)[0]:
        # what is in the pipe would be lost if both ends were closed now
        select.select([], [], [], WAIT_S)


@click.command()
@click.argument("registry", default="docker.io", metavar="[REGISTRY]")
@click.option("-u", "--username", help="[asked for]")
@click.option(
    "-p",
    "--password",
    help="Better asked for, or by --password-stdin: others see a command's words.",
)
@click.option("--password-stdin", is_flag=True, help="Read the password from stdin.")
@authfile
@click.pass_obj
def login(
    address: str,
    registry: str,
    username: str | None,
    password: str | None,
    password_stdin: bool,
    authfile: Path | None,
) -> None:
    """Log in at REGISTRY (docker.io) for `pull`, `push` and `run`. The server tries the login
    before it is kept."""
    Reference.parse(f"{registry}/x")
    if username is None:
        username = click.prompt("Username", err=True)
    if password_stdin:
        password = sys.stdin.readline().rstrip("\n")
    elif password is None:
        password = click.prompt("Password", hide_input=True, err=True)
    with Client(address) as client:
        auth = {"username": username, "password": password, "server_address": registry}
        try:
            client.admin(private.CheckLogin(registry, auth), private.Empty)
        except Unsupported:
            click.echo("pyrunc-cri: the server cannot try the login; it is kept as it is", err=True)
    path = credentials.save(registry, username, password or "", authfile)
    click.echo(f"logged in at {registry}; kept in {path}")


@click.command()
@click.argument("registry", required=False, metavar="[REGISTRY]")
@click.option("-a", "--all", "everything", is_flag=True, help="At all registries.")
@authfile
def logout(registry: str | None, everything: bool, authfile: Path | None) -> None:
    """Forget the login at REGISTRY (docker.io)."""
    for name in credentials.forget(None if everything else registry or "docker.io", authfile):
        click.echo(f"logged out at {name}")


def known(client: Client, reference: str) -> api.Image:
    """The local image. Raises NotFound."""
    response = client.image(
        "ImageStatus", api.ImageStatusRequest(image=api.ImageSpec(image=reference))
    )
    if not response.HasField("image"):
        raise NotFound(f"no such image: {reference!r}")
    return response.image  # type: ignore[no-any-return]
