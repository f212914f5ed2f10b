"""`install-node`: lists the actions that turn a machine into a node, and the actions that undo the
installation.

A record of the installed files is written first, so that another version can remove them, also
after an interrupted installation:

    /var/lib/pyrunc/installed.json     {files: {path: SHA-256 of the content, "" for a link},
                                        folders: [path], keep: [path]}
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec

from cni_plugins.protocol import builtin
from cri_server import config
from cri_server.install import files, kubelet
from cri_server.install.actions import (
    Action,
    EndKeeper,
    Folder,
    KeepFile,
    Remove,
    RunCommand,
    SymbolicLink,
    Write,
    beneath,
    read,
)
from cri_server.store import claim
from cri_server.store.paths import Paths
from pyrunc.errors import Error, WrongState
from pyrunc.kernel.mountinfo import mount_points

PODS = "/var/lib/pyrunc-pods"  # files of the pods of `run` (cri_server.cli.manifest.folders)
RECORD = "/var/lib/pyrunc/installed.json"
PACKAGE = "/usr/lib/pyrunc"  # the modules of the Debian package, which installs the rest itself
PACKAGED_PLUGINS = f"{PACKAGE}/cni"
PLUGINS = "/opt/cni/bin"
FOLDERS = {"/var/lib/pyrunc": 0o700, "/etc/cni/net.d": 0o755, PLUGINS: 0o755}
FILTERS = "/run/pyrunc/.seccomp"  # the OCI runtime's cache of compiled seccomp filters
FIREWALL = "pyrunc_cni"  # the nftables table of the CNI plugins (cni_plugins/net/host_rules.py)
SYSTEMD = Path("/run/systemd/system")


class InstallRecord(msgspec.Struct, kw_only=True):
    """What an installation has written (`installed.json`).

    - `files`: {path: SHA-256 of the file's content, "" for a link}.
    - `folders`: the folders that the installation created.
    - `keep`: files that an uninstallation without purge keeps if they were changed.
    """

    version: int = 1
    files: dict[str, str] = msgspec.field(default_factory=dict)
    folders: list[str] = msgspec.field(default_factory=list)
    keep: list[str] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """The options of an installation.

    - `root`: the root directory of the machine to install; if it is not /, no command is run.
    - `scripts`: the folder of the executables; None if a package has installed them.
    - `programs`: {name of an executable: its click command}.
    """

    root: Path
    scripts: str | None
    programs: Mapping[str, click.Group] = field(default_factory=dict)
    with_kubelet: bool = True
    start: bool = True

    @property
    def is_live(self) -> bool:
        """True for the machine that this process runs on, if systemd runs there."""
        return self.root == Path("/") and SYSTEMD.is_dir()


def is_packaged() -> bool:
    """Return whether pyrunc was installed as a Debian package."""
    return os.path.realpath(__file__).startswith(f"{PACKAGE}/")


def install_actions(request: InstallRequest) -> list[Action]:
    """Return the actions of an installation, including those that have nothing left to do. Raises
    OSError when a file cannot be read, Error when an existing file is not a regular file or the
    record of an earlier installation is malformed."""
    installing = [*_files(request), *_plugins(request), *_kubelet(request)]
    folders = _missing_folders(request.root, installing)
    record = _read_record(request.root)
    for action in installing:
        if isinstance(action, Write):
            record.files[action.path] = _digest(action.content)
        elif isinstance(action, SymbolicLink):
            record.files[action.path] = ""
    recorded = {*record.folders}
    record.folders += [folder.path for folder in folders if folder.path not in recorded]
    record.keep = sorted(
        {*record.keep, *(f.path for f in _file_list(request) if f.keep)} & record.files.keys()
    )
    record_folders = [folder for folder in folders if RECORD.startswith(f"{folder.path}/")]
    others = [folder for folder in folders if folder not in record_folders]
    note = Write(RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n", 0o600)
    return [*record_folders, note, *others, *installing, *_start(request)]


def uninstall_actions(request: InstallRequest, purge: bool) -> list[Action]:
    """Return the actions that undo an installation. `purge`: also remove images, records and a
    changed configuration.

    Raises OSError when a file cannot be read, Error when the installation's record or the
    configuration is malformed, and WrongState in these cases:

    - there are pods;
    - a server that systemd did not start is running;
    - with `purge`: something is mounted below the folders to remove.
    """
    refuse_with_pods(request.root)
    refuse_with_server(request)
    if purge:
        refuse_with_mounts(request.root)
    record = _read_record(request.root)
    actions: list[Action] = []
    if request.is_live and request.scripts is not None:
        actions.append(RunCommand(("systemctl", "disable", "--now", files.UNIT), may_fail=True))
    if request.scripts is not None:  # a package's scripts do this when they stop the server
        actions.append(EndKeeper(_settings(request.root).server.state))
    for path, digest in record.files.items():
        actions.append(_removal(request.root, path, digest, path in record.keep and not purge))
    actions.append(Remove(RECORD))
    if purge:
        actions += _data(request.root)
        if request.is_live:
            actions.append(RunCommand(("nft", "delete", "table", "inet", FIREWALL), may_fail=True))
    # A folder sorts before those in it: in reverse order, each is empty before its removal.
    actions += [Remove(path) for path in sorted(record.folders, reverse=True)]
    if request.is_live:
        actions.append(RunCommand(("systemctl", "daemon-reload")))
    return actions


def refuse_with_pods(root: Path) -> None:
    """Raise WrongState while there is a pod of this boot, running or not, because its containers
    would lose their root file systems."""
    settings = _settings(root)
    states = Paths(
        beneath(root, settings.server.root), beneath(root, settings.server.state)
    ).sandbox_states
    count = len(list(states.iterdir())) if states.is_dir() else 0
    if count:
        raise WrongState(
            f"{count} pod{'s' if count > 1 else ''} of this boot: stop kubelet, then remove all "
            "pods that `pyrunc-cri pods` lists"
        )


def refuse_with_server(request: InstallRequest) -> None:
    """Raise WrongState while a server runs that systemd did not start: it would lose its folders.
    (The uninstallation stops a server of the systemd unit.)"""
    settings = _settings(request.root)
    for folder in (settings.server.root, settings.server.state):
        if claim.is_locked(beneath(request.root, folder)) and not (
            request.is_live and _unit_runs()
        ):
            raise WrongState(
                f"{folder} is in use by a server that systemd did not start:"
                " stop `pyrunc-cri serve` first"
            )


def refuse_with_mounts(root: Path) -> None:
    """Raise WrongState if anything is mounted below a folder that is to be removed, because
    removing it could delete files of another file system."""
    folders = [os.path.realpath(beneath(root, path)) for path in _folders(_settings(root))]
    for mount in mount_points():
        if any(mount.path.startswith(f"{folder}/") for folder in folders):
            raise WrongState(f"{mount.path} is a mount point: umount it first")


def _unit_runs() -> bool:
    command = ["systemctl", "show", "--property=ActiveState", "--value", files.UNIT]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return state not in ("", "inactive", "failed")


def carry_out(
    root: Path, actions: Iterable[Action], dry_run: bool
) -> Iterator[tuple[Action, bool]]:
    """Carry out the actions that are not done yet; with `dry_run` carry out none. Yield each
    action, and whether it had to be carried out (False for a KeepFile). Raises OSError when a file
    cannot be read or written, Error when a command fails or a path is not a regular file."""
    for action in actions:
        needed = not action.is_done(root)
        if needed and not dry_run:
            action.do(root)
        yield action, needed and not isinstance(action, KeepFile)


def _file_list(request: InstallRequest) -> list[files.NodeFile]:
    if request.scripts is None:
        return []
    return list(files.files(files.local(f"{request.scripts}/pyrunc-cri"), request.programs))


def _files(request: InstallRequest) -> Iterator[Action]:
    for file in _file_list(request):
        content = file.text.encode()
        if file.keep and _is_changed(request.root, file.path, content):
            yield KeepFile(file.path, "it exists")
            continue
        yield Write(file.path, content, file.mode)
    # sudo's secure_path and systemd's default PATH lack the folder of a virtual environment.
    if request.scripts is not None and request.scripts != "/usr/local/bin":
        for name in request.programs:
            yield SymbolicLink(f"/usr/local/bin/{name}", f"{request.scripts}/{name}")


def _is_changed(root: Path, path: str, content: bytes) -> bool:
    """Return whether the administrator has changed the file: it exists, and its content is neither
    `content` nor that of an earlier installation."""
    file = beneath(root, path)
    if not file.exists() or read(file) == content:
        return False
    return _digest(read(file)) != _read_record(root).files.get(path)


def _plugins(request: InstallRequest) -> Iterator[Action]:
    """Yield the actions that install the CNI plugins as executables. The server has them built in;
    the executables are for other runtimes, and for plugins such as flannel, which executes
    bridge."""
    for name in builtin.MODULES:
        path = f"{PLUGINS}/{name}"
        if not _is_free_for_ours(beneath(request.root, path)):
            yield KeepFile(path, "it belongs to another program")
        elif request.scripts is None:
            yield SymbolicLink(path, f"{PACKAGED_PLUGINS}/{name}")
        else:
            yield Write(
                path, builtin.script(name, sys.executable, builtin.import_path()).encode(), 0o755
            )


def _is_free_for_ours(path: Path) -> bool:
    """Return whether pyrunc's CNI plugin may be written to `path`: there is no file, or one of
    pyrunc's plugins."""
    if path.is_symlink() and os.readlink(path).startswith(f"{PACKAGED_PLUGINS}/"):
        return True
    try:
        return builtin.is_builtin_script(read(path)[: builtin.HEAD_BYTES])
    except FileNotFoundError:
        return not path.is_symlink()


def _kubelet(request: InstallRequest) -> Iterator[Action]:
    text = kubelet.drop_in(request.root) if request.with_kubelet else None
    if text is not None:
        yield Write(kubelet.DROP_IN, text.encode())


def _missing_folders(root: Path, actions: Sequence[Action]) -> list[Folder]:
    """Return the actions that create missing folders, parents first: FOLDERS, and the folders of
    the files and links that `actions` write."""
    modes = dict(FOLDERS)
    for action in actions:
        if isinstance(action, Write | SymbolicLink):
            modes.setdefault(os.path.dirname(action.path), 0o755)
    for path in list(modes):
        while (path := os.path.dirname(path)) != "/":
            modes.setdefault(path, 0o755)
    return [Folder(path, modes[path]) for path in sorted(modes) if not beneath(root, path).exists()]


def _start(request: InstallRequest) -> Iterator[Action]:
    if not request.is_live:
        return
    # Makes systemd read the new unit and kubelet's drop-in.
    yield RunCommand(("systemctl", "daemon-reload"))
    if request.scripts is None:
        return
    yield RunCommand(("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/pyrunc.conf"))
    yield RunCommand(("systemctl", "restart", "systemd-modules-load.service"), may_fail=True)
    yield RunCommand(("systemctl", "restart", "systemd-sysctl.service"), may_fail=True)
    if request.start:
        yield RunCommand(("systemctl", "enable", "--now", files.UNIT))


def _removal(root: Path, path: str, digest: str, keep_changes: bool) -> Action:
    """Return the action that undoes the installation of the file at `path`. This is Remove, but
    KeepFile in two cases:

    - the file now belongs to something else than pyrunc;
    - with `keep_changes`: the file's content no longer has the `digest`.
    """
    target = beneath(root, path)
    if digest and target.is_file() and not target.is_symlink():
        changed = _digest(read(target)) != digest
        if changed and keep_changes:
            return KeepFile(path, "it was changed after the installation (--purge removes it)")
        if path.startswith(PLUGINS) and changed and not _is_free_for_ours(target):
            return KeepFile(path, "it belongs to another program")
    elif not digest and os.path.lexists(target) and not target.is_symlink():
        return KeepFile(path, "it belongs to another program")
    return Remove(path)


def _data(root: Path) -> list[Action]:
    """Return the actions that remove all data. In /run/pyrunc, which the OCI runtime uses too, they
    remove only the socket and the compiled seccomp filters, and the folder if it is then empty."""
    settings = _settings(root)
    socket = str(settings.socket_path)
    whole = [Remove(path, whole=True) for path in _folders(settings)]
    return [*whole, *map(Remove, (socket, os.path.dirname(socket), settings.network.netns_dir))]


def _folders(settings: config.Config) -> Sequence[str]:
    """Return the folders that a purge removes with their contents."""
    return settings.server.state, settings.server.root, FILTERS, PODS


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _settings(root: Path) -> config.Config:
    file = beneath(root, str(config.DEFAULT_PATH))
    if not file.exists():
        return config.Config()
    read(file)  # raises an error for anything but a regular file
    return config.load(file, {})


def _read_record(root: Path) -> InstallRecord:
    file = beneath(root, RECORD)
    try:
        return msgspec.json.decode(read(file), type=InstallRecord)
    except FileNotFoundError:
        return InstallRecord()
    except msgspec.MsgspecError as error:
        raise Error(f"{RECORD}: {error}") from None
