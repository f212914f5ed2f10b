"""A drop-in for a kubelet that systemd runs: the same command line with our socket at its end,
started after our server.

Of a flag that is given twice kubelet takes the last, so it does not matter which endpoint kubeadm's
flags or variables name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNIT = "kubelet.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/90-pyrunc.conf"
ENDPOINT = "unix:///run/pyrunc/cri.sock"
# systemd.unit(5): earlier folders win.
FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")  # fmt: skip


def drop_in(root: Path) -> str | None:
    """Its text for the machine at `root`; None when no unit there starts a kubelet. Raises OSError,
    UnicodeDecodeError."""
    command = ""
    for file in _unit_files(root):
        command = _last_start(file.read_text(encoding="utf-8"), command)
    if not command:
        return None
    return (
        "# Written by `pyrunc-cri install-node`, which `pyrunc-cri install-node --uninstall` takes back.\n"
        "[Unit]\nAfter=pyrunc-cri.service\nWants=pyrunc-cri.service\n\n"
        f"[Service]\nExecStart=\nExecStart={command} --container-runtime-endpoint={ENDPOINT}\n"
    )


def _unit_files(root: Path) -> Iterator[Path]:
    """The unit and its drop-ins but ours, in the order in which systemd reads them."""
    units = [root / folder / UNIT for folder in FOLDERS]
    yield from [unit for unit in units if unit.is_file()][:1]
    drop_ins: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        drop_ins |= {path.name: path for path in (root / folder / f"{UNIT}.d").glob("*.conf")}
    for name in sorted(drop_ins):
        if name != Path(DROP_IN).name:
            yield drop_ins[name]


def _last_start(text: str, command: str) -> str:
    """The ExecStart= that holds after a file; an empty one takes back those before it."""
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == "[Service]":
            key, found, value = line.partition("=")
            if found and key.rstrip() == "ExecStart":
                command = " ".join(value.split())
    return command
