"""Runs Kubernetes' node suite, `e2e_node.test`, in a guest: the suite brings etcd, an API server
and a kubelet, which is a unit of the guest's systemd."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cri_server.config import NetworkConfig, ServerConfig
from tests.kube_e2e import images
from tests.kube_e2e_node import suite as kube_e2e_node
from tests.support import ginkgo, guest_disk, guest_node, toolchain
from tests.support.cluster_node import bridge_network
from tests.support.guest import Guest

DISK, FOLDER = "/opt/suite", "/root/suite"
UNIT = "pyrunc-cri.service"
NODE, NODE_IP = "node1", "10.0.2.15"
PYTHON = "/opt/venv/bin/python"
# A part of the names of MemoryQoS' specs.
OLDER_BUSYBOX = f"{images.E2E}/busybox:1.36.1-1"
KUBELET = {
    **kube_e2e_node.KUBELET,
    "failCgroupV1": True,
    "cgroupsPerQOS": True,
    "enforceNodeAllocatable": ["pods"],
    "cgroupDriver": "systemd",
}
# The handler of the RuntimeClasses that specs make.
SETTINGS = """[cgroup]
driver = "systemd"
missing_controllers = "error"
[runtimes.test-handler]
"""
INSTALL = f"""set -e
{PYTHON} -m pip install -q --disable-pip-version-check --no-index --no-deps \
{guest_node.INPUT}/wheels/*.whl
{PYTHON} -m compileall -q /opt/venv/lib/python3*/site-packages/pyrunc \
/opt/venv/lib/python3*/site-packages/cri_server \
/opt/venv/lib/python3*/site-packages/cni_plugins
mkdir -p /etc/pyrunc {NetworkConfig().conf_dir} {DISK} {FOLDER}
mount -o ro /dev/disk/by-label/node-suite {DISK}
cat >/etc/pyrunc/config.toml <<C
{SETTINGS}C
cat >{NetworkConfig().conf_dir}/10-pods.conflist
/opt/venv/bin/pyrunc-cri install-node --no-kubelet
/opt/venv/bin/pyrunc-cri load -q {DISK}/e2e.tar
/opt/venv/bin/pyrunc-cri tag {images.E2E}/busybox:1.37.0-1 {OLDER_BUSYBOX}
# The suite calls sudo, which the guest does not have, and writes files beside its program.
printf '#!/bin/sh\\nexec "$@"\\n' >/usr/local/bin/sudo && chmod +x /usr/local/bin/sudo
ln -s {DISK}/e2e_node.test {FOLDER}/e2e_node.test
"""
# The suite's own output goes to a file: it is megabytes.
RUN = f"""cd {FOLDER} && rm -rf reports && mkdir reports
printf %s "$(systemctl show --property=MainPID --value {UNIT})" >server.pid
cat >kubelet.yaml
COMMAND >ginkgo.log 2>&1
"""


def disk() -> Path:
    """Return the disk with the suite's programs and images."""
    programs = [toolchain.e2e_node(), toolchain.e2e_helpers() / "ginkgo"]
    programs.append(toolchain.kubernetes() / "kubelet")
    files = {program.name: program for program in programs}
    return guest_disk.of_files("node-suite", {**files, "e2e.tar": images.archive()})


class NodeSuite:
    """The suite in `guest`, which has the disk of `disk()`. `folder` on the host gets logs and
    reports."""

    def __init__(self, guest: Guest, folder: Path) -> None:
        self.guest = guest
        self.folder = folder

    def install(self) -> None:
        """Install and start the server, with a network and the images."""
        network = json.dumps(bridge_network(Path("/var/lib/cni")))
        with tempfile.TemporaryDirectory() as folder:
            guest_node.push(self.guest, {"wheels": [guest_node.wheel(Path(folder))]})
        self.guest.ssh(INSTALL, stdin=network.encode(), timeout_s=1200)

    def run(
        self,
        focus: Sequence[str],
        skip: Sequence[str],
        timeout_s: int,
        processes: int = 1,
        *options: str,
    ) -> list[ginkgo.Spec]:
        """Run the specs that match a pattern of `focus` and none of `skip`; return ginkgo's reports
        of them."""
        command = [
            f"{DISK}/ginkgo",
            f"--procs={processes}",
            f"--timeout={timeout_s}s",
            "--no-color",
            "-v",
            f"--focus={'|'.join(focus)}",
            *(f"--skip={pattern}" for pattern in skip),
            "--json-report=report.json",
            f"--output-dir={FOLDER}/reports",
            f"{FOLDER}/e2e_node.test",
            "--",
            f"--k8s-bin-dir={DISK}",
            f"--report-dir={FOLDER}/reports",
            f"--node-name={NODE}",
            f"--container-runtime-endpoint={ServerConfig().listen}",
            "--prepull-images=false",
            f"--container-runtime-pid-file={FOLDER}/server.pid",
            "--server-start-timeout=10m",
            f"--kubelet-config-file={FOLDER}/kubelet.yaml",
            f"--kubelet-flags=--node-ip={NODE_IP}",
            f"--kubelet-flags=--runtime-cgroups=/system.slice/{UNIT}",
            *options,
        ]
        script = RUN.replace("COMMAND", shlex.join(command))
        settings = json.dumps(KUBELET).encode()
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guest.ssh(script, check=False, stdin=settings, timeout_s=timeout_s + 300)
        for name in ("ginkgo.log", "reports/report.json", "reports/kubelet.log"):
            if content := self.guest.ssh(f"cat {FOLDER}/{name}", check=False).stdout:
                (self.folder / Path(name).name).write_bytes(content)
        return ginkgo.specs(report)
