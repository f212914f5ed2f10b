"""Installs containerd, its systemd unit, runc and the reference CNI plugins, as packages would, on
a guest that becomes a node by kubeadm."""

from __future__ import annotations

from pathlib import Path

from tests.bench.peer import PAUSE, pause_archive
from tests.support.guest import Guest

CONFIGURATION = f"""\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  SystemdCgroup = true
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE}"
"""
UNIT = """\
[Unit]
Description=containerd container runtime
After=network.target

[Service]
Environment=GOMAXPROCS=1 GOGC=400
ExecStart=/usr/local/bin/containerd
Type=notify
Delegate=yes
KillMode=process
Restart=always
OOMScoreAdjust=-999
TimeoutStartSec=600

[Install]
WantedBy=multi-user.target
"""
NETWORK = """\
{
  "cniVersion": "1.0.0", "name": "pods",
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true,
     "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]],
              "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
"""
INSTALL = f"""
set -e
mkdir -p /mnt/containerd /etc/containerd /etc/cni/net.d /opt/cni/bin
mount -o ro /dev/disk/by-label/containerd /mnt/containerd
ln -s /mnt/containerd/bin/* /usr/local/bin/
cp /mnt/containerd/cni/* /opt/cni/bin/
cat >/etc/containerd/config.toml <<'E'
{CONFIGURATION}E
cat >/etc/cni/net.d/10-pods.conflist <<'E'
{NETWORK}E
cat >/etc/systemd/system/containerd.service <<'E'
{UNIT}E
systemctl daemon-reload
systemctl enable --now containerd
"""


def install(guest: Guest, folder: Path) -> None:
    """Install and start containerd on a guest with the disk `containerd`; `folder` gets the archive
    of the sandbox image."""
    guest.ssh(INSTALL)
    guest.ssh("ctr -n k8s.io images import --local -", stdin=pause_archive(folder).read_bytes())
