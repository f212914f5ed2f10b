"""A drop-in for a kubelet that systemd runs. It appends the server's socket to kubelet's command
line and orders kubelet after the server.

kubelet uses the last one of repeated flags, so the drop-in overrides endpoints in kubeadm's flags
and variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNIT = "kubelet.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/90-pyrunc.conf"
ENDPOINT = "unix:///run/pyrunc/cri.sock"
# earlier folders take precedence: systemd.unit(5)
FOLDERS = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)


def drop_in(root: Path) -> str | None:
    """Return the drop-in's text for the machine at `root`; None if no unit starts a kubelet. Raises
    OSError, UnicodeDecodeError."""
    command = ""
    for file in _unit_files(root):
        command = _last_start(file.read_text(encoding="utf-8"), command)
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


def _unit_files(root: Path) -> Iterator[Path]:
    """Yield the unit and its drop-ins except ours, in the order in which systemd reads them."""
    units = [root / folder / UNIT for folder in FOLDERS]
    yield from [unit for unit in units if unit.is_file()][:1]
    drop_ins: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        drop_ins |= {path.name: path for path in (root / folder / f"{UNIT}.d").glob("*.conf")}
    for name in sorted(drop_ins):
        if name != Path(DROP_IN).name:
            yield drop_ins[name]


def _last_start(text: str, command: str) -> str:
    """Return the command of ExecStart= after a file; an empty ExecStart= removes earlier ones."""
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == "[Service]":
            key, equals, value = line.partition("=")
            if equals and key.rstrip() == "ExecStart":
                command = " ".join(value.split())
    return command
