"""`pyrunc-cri pull`, `push`, `load`, `save`, `tag`, `login` and `logout`.

`pull` works with any CRI server; on a terminal it uses a private call of pyrunc-cri, which reports
progress. The other verbs need a server of pyrunc-cri.
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
from cri_server.cli.arguments import completion, options
from cri_server.cli.arguments.files import FILE
from cri_server.cli.connection.client import Client, UnsupportedCall
from cri_server.cli.images import credentials
from cri_server.cli.output.progress import ProgressLine
from cri_server.cli.output.report import for_each, report
from cri_server.images.formats.reference import Reference
from cri_server.rpc import private
from pyrunc.errors import Error, InvalidArgument
from pyrunc.kernel.fd import closing_fd

CHUNK_BYTES = 1 << 16  # the capacity of a pipe: pipe(7)
WAIT_S = 0.1

authfile = click.option(
    "--authfile", type=click.Path(path_type=Path), metavar="FILE", help="The file of logins."
)
creds = click.option("--creds", metavar="USER[:PASSWORD]", help="The login for this call.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Do not show the progress.")


@click.command()
@options.names("IMAGE...", completion.images)
@creds
@authfile
@quiet_option
@click.option(
    "--platform",
    metavar="OS/ARCH[/VARIANT]",
    callback=lambda context, option, value: _parse_platform(value),
    help="The image for this platform instead of the best one for this processor.",
)
@click.pass_obj
def pull(
    address: str,
    names: tuple[str, ...],
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
            click.echo(_follow_progress(client, request, f"pulling {name}", quiet=quiet))

        for_each(names, act)


def _parse_platform(text: str | None) -> str | None:
    """Return the value of --platform in normal form; None without the option. Prints a warning if
    this machine's processor cannot run images for the platform. Raises click.BadParameter if the
    value is invalid."""
    if text is None:
        return None
    from cri_server.images.formats import platforms

    try:
        platform = platforms.parse(text)
    except InvalidArgument as error:
        raise click.BadParameter(error.message) from None
    if platforms.rank(platform, platforms.host_processors()) is None:
        report(f"this processor runs images for {platform} only with binfmt_misc")
    return str(platform)


def fetch(
    client: Client, reference: str, auth: api.AuthConfig | None = None, *, quiet: bool = False
) -> str:
    """Pull an image and return its id. Shows the progress that the server reports, if stderr is a
    terminal and `quiet` is not set. Raises ServerError."""
    if sys.stderr.isatty() and not quiet:
        with contextlib.suppress(UnsupportedCall):
            return _follow_progress(
                client, private.PullImage(reference, _fields(auth)), f"pulling {reference}"
            )
    request = api.PullImageRequest(image=api.ImageSpec(image=reference), auth=auth)
    return str(client.call(request, None).image_ref)


def _fields(auth: api.AuthConfig | None) -> dict[str, str]:
    return {} if auth is None else {field.name: value for field, value in auth.ListFields()}


def _follow_progress(
    client: Client,
    request: private.PullImage | private.PullPlatform | private.PushImage,
    label: str,
    *,
    quiet: bool = False,
) -> str:
    with ProgressLine(label, quiet=quiet) as progress:
        for message in client.admin_stream(request, private.decoder(private.TransferUpdate)):
            if message.id is not None:
                return message.id
            if message.progress is not None:
                progress.set(
                    message.progress.fetched_bytes,
                    message.progress.total_bytes,
                    message.progress.stage,
                )
    raise Error(f"{label}: the server ended the call without a result")


def _login(reference: str, creds: str | None, chosen: Path | None) -> api.AuthConfig | None:
    if creds is not None:
        return credentials.parse_option(creds, Reference.parse(reference).registry)
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
    """Send IMAGE to the registry in its name. With NAME, send it to the registry in NAME, under
    that name."""
    target = target or image
    with Client(address) as client:
        request = private.PushImage(image, target, _fields(_login(target, creds, authfile)))
        click.echo(_follow_progress(client, request, f"pushing {target}"))


@click.command()
@click.argument("source", metavar="IMAGE", shell_complete=completion.images)
@click.argument("targets", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def tag(address: str, source: str, targets: tuple[str, ...]) -> None:
    """Give IMAGE further names."""
    with Client(address) as client:

        def act(name: str) -> None:
            client.admin(private.TagImage(source, name), private.Empty)

        for_each(targets, act)


@click.command(short_help="Write images as an archive for docker, podman, skopeo, load")
@options.names("IMAGE...", completion.images)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE."
)
@quiet_option
@click.pass_obj
def save(address: str, names: tuple[str, ...], output: Path | None, quiet: bool) -> None:
    """Write images to an archive that docker, podman, skopeo and `load` can read."""
    if output is None and sys.stdout.isatty():
        raise InvalidArgument("an archive cannot be written to a terminal: use -o FILE")
    with (
        Client(address) as client,
        _written(output) as file,
        ProgressLine("saving", quiet=quiet) as progress,
    ):
        for part in client.admin_stream(private.SaveImages(list(names)), bytes):
            file.write(part)
            progress.add(len(part))


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[BinaryIO]:
    """Yield the file that the `with` block writes: stdout if `path` is None, `path` itself if it is
    a special file such as /dev/stdout, else a temporary file. After the block the temporary file is
    renamed to `path`. If another user has put a symbolic link there, the rename replaces it."""
    if path is None:
        yield sys.stdout.buffer
        return
    special = path.exists() and not path.is_file()  # such as /dev/stdout
    if special and (not path.is_symlink() or path.absolute().is_relative_to("/dev")):
        with open(path, "wb") as file:
            yield file
        return
    partial = path.with_name(f".{os.urandom(8).hex()}.part")
    with open(partial, "xb") as file:
        try:
            yield file
            file.flush()
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@click.command(short_help="Import an archive of images from FILE or stdin")
@click.argument("file", required=False, type=FILE, metavar="[FILE|-]")
@click.option(*("-i", "--input", "input_file"), type=FILE, metavar="FILE", help="The same as FILE.")
@click.option("--name", help="The name for the only image of an archive without names.")
@quiet_option
@click.pass_obj
def load(
    address: str, file: Path | None, input_file: Path | None, name: str | None, quiet: bool
) -> None:
    """Import FILE, or stdin: a docker-archive or an OCI archive, plain or compressed."""
    if file is not None and input_file is not None:
        raise click.UsageError("FILE and --input exclude each other")
    path = file or input_file or Path("-")
    with Client(address) as client:
        for image in _load(client, path, name, quiet=quiet):
            click.echo(f"{image.id}  {' '.join(image.repo_tags)}")


def _load(
    client: Client, path: Path, name: str | None, *, quiet: bool
) -> Sequence[private.LoadedImage]:
    if str(path) == "-":
        if sys.stdin.isatty():
            raise InvalidArgument("needs a file, or an archive on stdin")
        return _feed(client, sys.stdin.buffer, "stdin", name, ProgressLine("loading", quiet=quiet))
    # Opened here, because the server could read files that this user cannot.
    with open(path, "rb") as file:
        if not sys.stderr.isatty() or quiet:
            return client.load_image(str(path.resolve()), name)
        total = os.fstat(file.fileno()).st_size
        return _feed(client, file, str(path), name, ProgressLine(f"loading {path.name}", total))


def _feed(
    client: Client, source: BinaryIO, label: str, name: str | None, progress: ProgressLine
) -> Sequence[private.LoadedImage]:
    """Make the server load an archive from a pipe, which this process fills from `source`. Returns
    the loaded images. If this process is killed, the server reads end-of-file and does not wait
    forever."""
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
        # Opened for reading and writing, so that neither side's open(2) waits for the other.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        thread = threading.Thread(target=call, args=(path,), daemon=True)
        thread.start()
        with progress:
            with closing_fd(pipe):
                _fill(pipe, source, progress, thread.is_alive)
            progress.at("unpacking")
            thread.join()
    if isinstance(outcome[0], Error):
        raise outcome[0]
    images: Sequence[private.LoadedImage] = outcome[0]
    return images


def _fill(pipe: int, source: BinaryIO, progress: ProgressLine, is_read: Callable[[], bool]) -> None:
    """Copy `source` into the pipe, and return when the server has read all of it. Return early when
    `is_read` returns False: the server has stopped reading."""
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
        # closing both ends now would discard the pipe's content
        select.select([], [], [], WAIT_S)


@click.command()
@click.argument("registry", default="docker.io", metavar="[REGISTRY]")
@click.option("-u", "--username", help="The user; asked for by default.")
@click.option(
    "-p",
    "--password",
    help="The password; asked for by default. Other users can see it in the list of processes.",
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
    """Log in at REGISTRY, by default docker.io, for `pull`, `push` and `run`. The server checks the
    login before it is stored."""
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
        except UnsupportedCall:
            report("warning: the server cannot check the login")
    path = credentials.save(registry, username, password or "", authfile)
    click.echo(f"logged in at {registry}; stored in {path}")


@click.command()
@click.argument("registry", required=False, metavar="[REGISTRY]")
@click.option("-a", "--all", "all_registries", is_flag=True, help="Remove all logins.")
@authfile
def logout(registry: str | None, all_registries: bool, authfile: Path | None) -> None:
    """Remove the stored login for REGISTRY, by default docker.io."""
    for name in credentials.forget(None if all_registries else registry or "docker.io", authfile):
        click.echo(f"logged out at {name}")
