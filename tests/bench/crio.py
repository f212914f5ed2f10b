"""Runs the second peer: CRI-O with crun, conmon and the reference CNI plugins, in its own network
namespace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.peer import PAUSE, bridge_network, enter, version_of
from tests.support import crio, toolchain
from tests.support.processes import Program, wait_until

UNIFIED = "/sys/fs/cgroup/unified"
CRUNS_DEFAULT = Path("/run/crun")
"""crun makes it when CRI-O asks it for its features, which is without our folder for its state."""


class Crio:
    """Runs CRI-O under `folder`; `socket` answers CRI after `start`.

    crun does not work on a host with the trees of cgroup v1 and v2. There CRI-O, with all its
    processes, runs on v1, in a mount namespace without the v2 tree, which a sleeping process holds
    open. In it /proc/cgroups shows the v2 controllers as off, because otherwise CRI-O has crun set
    kubelet's limits of huge pages.
    """

    def __init__(self, folder: Path, namespace: str, mounts: str = "") -> None:
        """Store the settings. CRI-O runs in a copy of the mount namespace of the file `mounts`, or
        of the present one if `mounts` is ""."""
        self.folder, self.namespace, self.mounts = folder, namespace, mounts
        self.socket = folder / "state/crio.sock"
        self.program = Program("crio", folder)
        self._sleeper = Program("crio-mounts", folder)
        self._programs, self._plugins = crio.peer(), toolchain.peer() / "cni"
        self._groups_before, self._had_default = _groups(), CRUNS_DEFAULT.exists()

    def launch(self) -> None:
        """Start CRI-O with its stored images, without waiting until it serves."""
        self.socket.unlink(missing_ok=True)
        environment = {"CONTAINERS_REGISTRIES_CONF": f"{self.folder}/registries.conf"}
        command = [f"{self._programs}/crio", "-c", f"{self.folder}/crio.conf", "-d", ""]
        self.program.start(
            [*enter(self.namespace, self._own_mounts()), *command], environment=environment
        )

    def start(self, images: Sequence[Path], timeout_s: float = 30) -> None:
        """Import `images` (docker-archives), one of them named like PAUSE, and start CRI-O."""
        self._write_configuration()
        self._make_mounts()
        for image in images:
            self._import(image)
        self.launch()
        if not wait_until(self.socket.exists, timeout_s):
            raise RuntimeError(f"CRI-O does not answer:\n{self.program.tail()}")

    def runtime(self) -> str:
        """Return the OCI runtime's name and version."""
        return version_of(self._programs / "crun")

    def stop(self) -> None:
        """Stop CRI-O, whose pods must have been removed. Also remove the cgroup of all pods, which
        CRI-O leaves in each hierarchy."""
        self.program.stop()
        self._sleeper.stop(signal.SIGKILL)
        for group in sorted(_groups() - self._groups_before, reverse=True):
            group.rmdir()
        if not self._had_default:
            with contextlib.suppress(OSError):  # another crun may use it by now
                CRUNS_DEFAULT.rmdir()

    def _make_mounts(self) -> None:
        ready = self.folder / "mounted"
        ready.unlink(missing_ok=True)
        hide = "true"
        if os.path.ismount(UNIFIED):
            (self.folder / "cgroups").write_text(_without_v2(Path("/proc/cgroups").read_text()))
            hide = f"umount {UNIFIED} && mount --bind {self.folder}/cgroups /proc/cgroups"
        script = f"{hide} && echo >{ready} && exec sleep infinity"
        unshare = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script]
        self._sleeper.start([*enter("", self.mounts), *unshare])
        if not wait_until(ready.exists, 10):
            raise RuntimeError(f"no mount namespace for CRI-O:\n{self._sleeper.tail()}")

    def _own_mounts(self) -> str:
        return f"/proc/{self._sleeper.pid}/ns/mnt"

    def _import(self, image: Path) -> None:
        with tarfile.open(image) as archive:
            manifest = archive.extractfile("manifest.json")
            assert manifest is not None
            (name,) = json.load(manifest)[0]["RepoTags"]
        store = f"overlay@{self.folder}/root+{self.folder}/state/runroot"
        command = ["skopeo", "--policy", f"{self.folder}/policy.json", "copy", "-q"]
        command += [f"docker-archive:{image}", f"containers-storage:[{store}]{name}"]
        command = [*enter("", self._own_mounts()), *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"CRI-O does not import {image}: {done.stderr}")

    def _write_configuration(self) -> None:
        """Write CRI-O's configuration, with `folder`/state in place of /run."""
        net = self.folder / "net.d"
        net.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        network = bridge_network("crio", "10.89.0.0/16", self.folder / "leases")
        (net / "10-crio.conflist").write_text(json.dumps(network))
        accept_all = {"default": [{"type": "insecureAcceptAnything"}]}
        # Not named in crio.conf, because with a signature policy CRI-O demands
        # `user_specified_image` in CreateContainer.
        (self.folder / "policy.json").write_text(json.dumps(accept_all))
        (self.folder / "registries.conf").write_text('short-name-mode = "permissive"\n')
        (self.folder / "crio.conf").write_text(_toml(self._configuration(net)))

    def _configuration(self, net: Path) -> dict[str, dict[str, Any]]:
        folder, state = self.folder, self.folder / "state"
        return {
            "crio": {
                "root": f"{folder}/root",
                "runroot": f"{state}/runroot",
                "storage_driver": "overlay",
                "log_dir": f"{folder}/logs",
                "version_file": f"{state}/version",
                "clean_shutdown_file": f"{folder}/clean.shutdown",
            },
            "crio.api": {"listen": str(self.socket)},
            "crio.runtime": {
                "default_runtime": "crun",
                "cgroup_manager": "cgroupfs",
                "pinns_path": f"{self._programs}/pinns",
                "namespaces_dir": f"{state}/namespaces",
                "container_exits_dir": f"{state}/exits",
                "container_attach_socket_dir": f"{state}/attach",
                "hooks_dir": [],
                "irqbalance_config_restore_file": "disable",
            },
            "crio.runtime.runtimes.crun": {
                "runtime_path": f"{self._programs}/crun",
                "runtime_root": f"{state}/crun",
                "monitor_path": f"{self._programs}/conmon",
                "monitor_cgroup": "pod",
            },
            "crio.image": {"pause_image": PAUSE, "signature_policy_dir": f"{folder}/policies"},
            "crio.network": {"network_dir": str(net), "plugin_dirs": [str(self._plugins)]},
            "crio.nri": {"nri_listen": f"{state}/nri.sock"},
        }


def _without_v2(text: str) -> str:
    """Return `text`, which is /proc/cgroups (cgroups(7)), with those controllers off that no
    hierarchy of cgroup v1 has."""
    rows = [line.split() for line in text.splitlines()]
    return "".join("\t".join([*row[:3], "0"] if row[1] == "0" else row) + "\n" for row in rows)


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Format tables of strings and lists of strings, which TOML writes as JSON does."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _groups() -> set[Path]:
    """Return the cgroups `crio*` at the top of the trees of cgroup v1 and v2, and all groups below
    them."""
    tops = {
        group
        for place in ("crio*", "*/crio*")
        for group in Path("/sys/fs/cgroup").glob(place)
        if group.is_dir()
    }
    return tops | {group for top in tops for group in top.rglob("*") if group.is_dir()}
