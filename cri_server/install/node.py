"""`install-node`: the list of actions that makes a machine a node of ours, and the list that takes
it back.

What was put there is written down first, so that another version, or a run that was interrupted, is
taken back in full:

    /var/lib/pyrunc/installed.json     {files: {path: SHA-256 of what was written, "" for a link}, folders: [path], keep: [path]}
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
    Keep,
    Link,
    Remove,
    Run,
    Write,
    beneath,
    read,
)
from cri_server.store import claim
from cri_server.store.paths import Paths
from pyrunc.errors import Error, WrongState
from pyrunc.kernel.mountinfo import mount_points

PODS = "/var/lib/pyrunc-pods"  # logs and volumes of the pods of `run` (cri_server.cli.pods.folders)
RECORD = "/var/lib/pyrunc/installed.json"
PACKAGE = "/usr/lib/pyrunc"
"""Where a distribution's package has our modules. What it installs itself is left to it."""
PACKAGED_PLUGINS = f"{PACKAGE}/cni"
PLUGINS = "/opt/cni/bin"
FOLDERS = {"/var/lib/pyrunc": 0o700, "/etc/cni/net.d": 0o755, PLUGINS: 0o755}
FILTERS = "/run/pyrunc/.seccomp"
"""Where the OCI runtime keeps seccomp filters that it has compiled."""
FIREWALL = "pyrunc_cni"
"""The nftables table of our network plugins: `TABLE` of cni_plugins/net/host_rules.py."""
SYSTEMD = Path("/run/systemd/system")


class Record(msgspec.Struct, kw_only=True):
    """What an installation has put on the machine."""

    version: int = 1
    files: dict[str, str] = msgspec.field(default_factory=dict)
    folders: list[str] = msgspec.field(default_factory=list)
    keep: list[str] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Request:
    """`root`: the machine's root, another one for an image or a test, where no command is run.
    `scripts`: the folder of the programs that are being installed; None with a package. `programs`:
    their command lines."""

    root: Path
    scripts: str | None
    programs: Mapping[str, click.Group] = field(default_factory=dict)
    with_kubelet: bool = True
    start: bool = True

    @property
    def is_live(self) -> bool:
        """Whether this is the machine that we run on, with systemd."""
        return self.root == Path("/") and SYSTEMD.is_dir()


def is_packaged() -> bool:
    return os.path.realpath(__file__).startswith(f"{PACKAGE}/")


def install_actions(request: Request) -> list[Action]:
    """Everything, also what is there already. Raises OSError, Error."""
    wanted = [*_files(request), *_plugins(request), *_kubelet(request)]
    folders = _missing_folders(request.root, wanted)
    record = _read_record(request.root)
    for action in wanted:
        if isinstance(action, Write):
            record.files[action.path] = _digest(action.content)
        elif isinstance(action, Link):
            record.files[action.path] = ""
    known = {*record.folders}
    record.folders += [folder.path for folder in folders if folder.path not in known]
    record.keep = sorted(
        {*record.keep, *(f.path for f in _given_files(request) if f.keep)} & record.files.keys()
    )
    noted = [folder for folder in folders if RECORD.startswith(f"{folder.path}/")]
    others = [folder for folder in folders if folder not in noted]
    note = Write(RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n", 0o600)
    return [*noted, note, *others, *wanted, *_start(request)]


def uninstall_actions(request: Request, purge: bool) -> list[Action]:
    """What takes an installation back; with `purge` also images, records and a changed
    configuration. Raises WrongState while there are pods or a server that systemd does not stop,
    and for a purge while there are mounts below; OSError, Error."""
    refuse_with_pods(request.root)
    refuse_with_server(request)
    if purge:
        refuse_with_mounts(request.root)
    record = _read_record(request.root)
    actions: list[Action] = []
    if request.is_live and request.scripts is not None:
        actions.append(Run(("systemctl", "disable", "--now", files.UNIT), may_fail=True))
    if request.scripts is not None:  # a package's scripts do that when its server is stopped
        actions.append(EndKeeper(_settings(request.root).server.state))
    for path, digest in record.files.items():
        actions.append(_take_back(request.root, path, digest, path in record.keep and not purge))
    actions.append(Remove(RECORD))
    if purge:
        actions += _data(request.root)
        if request.is_live:
            actions.append(Run(("nft", "delete", "table", "inet", FIREWALL), may_fail=True))
    actions += [Remove(path) for path in sorted(record.folders, reverse=True)]
    if request.is_live:
        actions.append(Run(("systemctl", "daemon-reload")))
    return actions


def refuse_with_pods(root: Path) -> None:
    """Raises WrongState while a pod of this boot is there, running or not: its container would lose
    its root."""
    settings = _settings(root)
    found = Paths(
        beneath(root, settings.server.root), beneath(root, settings.server.state)
    ).sandbox_states
    count = len(list(found.iterdir())) if found.is_dir() else 0
    if count:
        raise WrongState(
            f"{count} pod{'s are' if count > 1 else ' is'} still there: stop kubelet, then remove what `pyrunc-cri pods` lists"
        )


def refuse_with_server(request: Request) -> None:
    """Raises WrongState while a server runs that is not the unit's, which is stopped: its folders
    would go from under it."""
    settings = _settings(request.root)
    for folder in (settings.server.root, settings.server.state):
        if claim.is_locked(beneath(request.root, folder)) and not (
            request.is_live and _unit_runs()
        ):
            raise WrongState(
                f"a server that systemd has not started uses {folder}: stop `pyrunc-cri serve` first"
            )


def refuse_with_mounts(root: Path) -> None:
    """Raises WrongState while something is mounted below a folder that is to be removed: its files
    are not ours."""
    folders = [os.path.realpath(beneath(root, path)) for path in _folders(_settings(root))]
    for mount in mount_points():
        if any(mount.path.startswith(f"{folder}/") for folder in folders):
            raise WrongState(f"something is mounted on {mount.path}: umount it first")


def _unit_runs() -> bool:
    command = ["systemctl", "show", "--property=ActiveState", "--value", files.UNIT]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return state not in ("", "inactive", "failed")


def carry_out(
    root: Path, actions: Iterable[Action], dry_run: bool
) -> Iterator[tuple[Action, bool]]:
    """Each action, and whether it was (or would be) carried out. Raises OSError, Error."""
    for action in actions:
        needed = not action.is_done(root)
        if needed and not dry_run:
            action.do(root)
        yield action, needed and not isinstance(action, Keep)


def _given_files(request: Request) -> list[files.File]:
    if request.scripts is None:
        return []
    return list(files.files(files.local(f"{request.scripts}/pyrunc-cri"), request.programs))


def _files(request: Request) -> Iterator[Action]:
    for file in _given_files(request):
        content = file.text.encode()
        if file.keep and _is_changed(request.root, file.path, content):
            yield Keep(file.path, "it is there")
            continue
        yield Write(file.path, content, file.mode)
    if request.scripts is not None and request.scripts != "/usr/local/bin":
        for name in request.programs:
            yield Link(f"/usr/local/bin/{name}", f"{request.scripts}/{name}")


def _is_changed(root: Path, path: str, content: bytes) -> bool:
    """Whether the file is there and neither what we would write nor what we wrote."""
    found = beneath(root, path)
    if not found.exists() or read(found) == content:
        return False
    return _digest(read(found)) != _read_record(root).files.get(path)


def _plugins(request: Request) -> Iterator[Action]:
    """The server has them built in; other runtimes and plugins that delegate look for executables."""
    for name in builtin.MODULES:
        path = f"{PLUGINS}/{name}"
        if not _is_free_for_ours(beneath(request.root, path)):
            yield Keep(path, "another's")
        elif request.scripts is None:
            yield Link(path, f"{PACKAGED_PLUGINS}/{name}")
        else:
            yield Write(
                path, builtin.script(name, sys.executable, builtin.import_path()).encode(), 0o755
            )


def _is_free_for_ours(path: Path) -> bool:
    if path.is_symlink() and os.readlink(path).startswith(f"{PACKAGED_PLUGINS}/"):
        return True
    try:
        return builtin.is_builtin_script(read(path)[: builtin.HEAD_BYTES])
    except FileNotFoundError:
        return not path.is_symlink()


def _kubelet(request: Request) -> Iterator[Action]:
    text = kubelet.drop_in(request.root) if request.with_kubelet else None
    if text is not None:
        yield Write(kubelet.DROP_IN, text.encode())


def _missing_folders(root: Path, actions: Sequence[Action]) -> list[Folder]:
    """Those of the files, parents first, and those that a node has anyway."""
    wanted = dict(FOLDERS)
    for action in actions:
        if isinstance(action, Write | Link):
            wanted.setdefault(os.path.dirname(action.path), 0o755)
    for path in list(wanted):
        while (path := os.path.dirname(path)) != "/":
            wanted.setdefault(path, 0o755)
    return [
        Folder(path, wanted[path]) for path in sorted(wanted) if not beneath(root, path).exists()
    ]


def _start(request: Request) -> Iterator[Action]:
    if not request.is_live:
        return
    yield Run(("systemctl", "daemon-reload"))
    if request.scripts is None:
        return
    yield Run(("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/pyrunc.conf"))
    yield Run(("systemctl", "restart", "systemd-modules-load.service"), may_fail=True)
    yield Run(("systemctl", "restart", "systemd-sysctl.service"), may_fail=True)
    if request.start:
        yield Run(("systemctl", "enable", "--now", files.UNIT))


def _take_back(root: Path, path: str, digest: str, keep_changes: bool) -> Action:
    found = beneath(root, path)
    if digest and found.is_file() and not found.is_symlink():
        changed = _digest(read(found)) != digest
        if changed and keep_changes:
            return Keep(path, "it was changed since (--purge removes it)")
        if path.startswith(PLUGINS) and changed and not _is_free_for_ours(found):
            return Keep(path, "another's")
    elif not digest and os.path.lexists(found) and not found.is_symlink():
        return Keep(path, "another's")
    return Remove(path)


def _data(root: Path) -> list[Action]:
    """/run/pyrunc is the OCI runtime's root as well: it goes when nothing is in it but compiled
    filters."""
    settings = _settings(root)
    socket = str(settings.socket_path)
    whole = [Remove(path, whole=True) for path in _folders(settings)]
    return [
        *whole,
        Remove(socket),
        Remove(os.path.dirname(socket)),
        Remove(settings.network.netns_dir),
    ]


def _folders(settings: config.Config) -> Sequence[str]:
    """What a purge removes with all that is in it."""
    return settings.server.state, settings.server.root, FILTERS, PODS


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _settings(root: Path) -> config.Config:
    file = beneath(root, str(config.DEFAULT_PATH))
    if not file.exists():
        return config.Config()
    read(file)  # what is no regular file is refused here
    return config.load(file, {})


def _read_record(root: Path) -> Record:
    file = beneath(root, RECORD)
    try:
        return msgspec.json.decode(read(file), type=Record)
    except FileNotFoundError:
        return Record()
    except msgspec.MsgspecError as error:
        raise Error(f"{RECORD}: {error}") from None
