"""A drop-in for a kubelet that systemd runs. It appends the server's socket to kubelet's command
line and orders kubelet after the server.

If a flag is repeated, kubelet uses the last value. The drop-in therefore overrides an endpoint in
kubeadm's flags and variables.
"""

from __future__ import annotations

from pathlib import Path

from cri_server.systemd.units import service_settings, unit_files
from pyrunc.errors import InvalidSpec

UNIT = "kubelet.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/90-pyrunc.conf"
ENDPOINT = "unix:///run/pyrunc/cri.sock"


def drop_in(root: Path) -> str | None:
    """Return the drop-in's text for the machine whose root directory is `root`; None if no unit
    starts a kubelet. Raises OSError, and InvalidSpec if kubelet's command is not UTF-8."""
    command = ""
    for file in unit_files(root, UNIT):
        if file.name != Path(DROP_IN).name:
            for key, value in service_settings(file):
                if key == "ExecStart":
                    if "\ufffd" in value:
                        raise InvalidSpec(str(file), f"not UTF-8: ExecStart={value}")
                    # An empty ExecStart= removes earlier ones.
                    command = " ".join(value.split())
    if not command:
        return None
    return (
        "# Written by `pyrunc-cri install-node`, and removed by its option --uninstall.\n"
        # Wants= and not Requires=, which would stop kubelet with each restart of the server
        # (systemd.unit(5)).
        "[Unit]\nAfter=pyrunc-cri.service\nWants=pyrunc-cri.service\n\n"
        # The empty ExecStart= is needed: only a oneshot service may have two commands
        # (systemd.service(5)).
        f"[Service]\nExecStart=\nExecStart={command} --container-runtime-endpoint={ENDPOINT}\n"
    )
