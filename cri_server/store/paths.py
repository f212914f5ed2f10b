"""The paths in the state directory (a tmpfs, empty after each boot) and in the root directory (on a
disk, durable).

A pod or container that has a folder but no record in `root` was being created or removed when the
server died.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pyrunc.kernel.ext4 import spread_subfolders

DEFAULT_STATE = "/run/pyrunc-cri"  # not the OCI runtime's root, where each folder is a container


@dataclass(frozen=True, slots=True)
class Paths:
    """All paths below the state directory and the root directory."""

    root: Path
    state: Path

    @property
    def sandbox_records(self) -> Path:
        return self.root / "sandboxes"

    @property
    def container_records(self) -> Path:
        return self.root / "containers"

    @property
    def sandbox_states(self) -> Path:
        return self.state / "sandboxes"

    @property
    def container_states(self) -> Path:
        return self.state / "containers"

    @property
    def shims(self) -> Path:
        """Return the folder that contains a folder for each shim. A shim's folder has its socket,
        shim.json and log."""
        return self.state / "shims"

    @property
    def earlier_shims(self) -> Path:
        """Return the folder that has a file for each shim of an earlier version. These shims are
        kept stopped (SIGSTOP), so that their containers' exit codes stay readable (`pod.earlier`).
        A shim's file is removed when its last container has ended."""
        return self.state / "earlier-shims"

    @property
    def trash(self) -> Path:
        """Return the folder that holds removed writable layers until they are deleted."""
        return self.root / "trash"

    @property
    def images(self) -> Path:
        return self.root / "images"

    def sandbox_record(self, sandbox_id: str) -> Path:
        return self.sandbox_records / f"{sandbox_id}.json"

    def sandbox_state(self, sandbox_id: str) -> Path:
        """Return the sandbox's state folder. It contains shim.sock, shim.json, pause.json and, if
        the sandbox was stopped in this boot, the empty file `stopped`."""
        return self.sandbox_states / sandbox_id

    def sandbox_stopped(self, sandbox_id: str) -> Path:
        """Return the path of an empty file that exists if the sandbox was stopped after its record
        was written."""
        return self.sandbox_state(sandbox_id) / "stopped"

    def sandbox_root(self, sandbox_id: str) -> Path:
        """Return the folder with the files that containers see: resolv.conf, hostname, hosts.

        Containers may write to these files without limit. So the folder is on the disk, whose usage
        kubelet limits. On the state directory's tmpfs the files could fill the host's memory and
        /run.
        """
        # In CVE-2020-8557 such a file, a pod's /etc/hosts made by kubelet, counted towards no
        # limit.
        return self.sandbox_records / sandbox_id

    def container_record(self, container_id: str) -> Path:
        return self.container_records / f"{container_id}.json"

    def container_state(self, container_id: str) -> Path:
        """Return the container's state folder, with config.json, launch.json, state.json and
        exit.json."""
        return self.container_states / container_id

    def container_root(self, container_id: str) -> Path:
        """Return the folder with the container's writable layer: `upper` and `work`."""
        return self.container_records / container_id

    def checkpoint_work(self, container_id: str) -> Path:
        """Return the folder with the files of a checkpoint while the checkpoint is made."""
        return self.container_root(container_id) / "checkpoint"

    def restore_folder(self, container_id: str) -> Path:
        """Return the folder with the checkpoint from which the container will be restored."""
        return self.container_root(container_id) / "restore"

    def prepare(self) -> None:
        """Create the directories below the root and state directories. Only the user root can list
        them, whatever the umask is. Raises OSError."""
        for path in (
            self.root,
            self.state,
            self.sandbox_records,
            self.container_records,
            self.sandbox_states,
            self.container_states,
            self.shims,
            self.images,
            self.trash,
        ):
            # The state directory may hold the socket, which a group may use; other users must not
            # reach images and records (CVE-2021-41103, CVE-2024-25621).
            mode = 0o711 if path == self.state else 0o700
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            os.chmod(path, mode)
        for path in (self.sandbox_records, self.container_records):
            spread_subfolders(path)
