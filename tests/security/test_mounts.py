"""Attacks on mount points: mounts must land inside the container's root, whatever the image, a
volume or a neighbour does to the names.

Classes: CVE-2021-30465 (a swapped component of a destination), CVE-2024-45310 (folders and files
made on the host), CVE-2024-21626 (through a working directory that is made), CVE-2025-62161 and
CVE-2025-31133 kin (sources), `..` and links in destinations.
"""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.security.attack import Canary, Swapping, bind, mount, refused, slowly
from tests.support.processes import wait_until
from tests.system.harness import Runtime

Config = dict[str, Any]
STEPS = ["move_mount", "mkdirat", "open_tree", "mknodat", "symlinkat", "unlinkat"]
CLIMB = "../../../../../../../../../.."


def observed(config: Config, runtime: Runtime) -> Path:
    """Add a hook that writes the container's mount table to a file, while the host's tree is still
    mounted in the container; return the file."""
    table = runtime.folder / "table"
    hook = runtime.folder / "observe"
    if not hook.exists():
        hook.write_text(
            "#!/bin/sh\npid=$(sed -n 's/.*\"pid\": *\\([0-9]*\\).*/\\1/p')\n"
            f"cat /proc/$pid/mountinfo >> {table}; echo >> {table}\n"
        )
        hook.chmod(0o755)
    config["hooks"] = {"createRuntime": [{"path": str(hook), "env": ["PATH=/usr/bin:/bin"]}]}
    return table


def outside_the_root(table: str, root: Path, source: str) -> list[str]:
    """Return the mounts of `source` in the table whose chain of parents does not lead to the
    container's root."""
    below = str(root.relative_to(next(above for above in root.parents if above.is_mount())))
    wrong = []
    for snapshot in table.split("\n\n"):
        rows = {line.split()[0]: line.split() for line in snapshot.splitlines() if line}
        roots = {
            number for number, row in rows.items() if row[4] == "/" and row[3].endswith(f"/{below}")
        }
        for number, row in rows.items():
            if row[row.index("-") + 2] != source:
                continue
            chain = {number}
            while row[1] in rows and row[1] not in chain:
                chain.add(row[1])
                row = rows[row[1]]
            if not chain & roots:
                wrong.append(" ".join(rows[number]))
    return wrong


@pytest.mark.parametrize(
    "target",
    [
        "{canary}",
        CLIMB + "{canary}",
        "/" + CLIMB + "{canary}",
        # magic links of procfs
        "/proc/self/root{canary}",
        "/proc/1/cwd{canary}",
    ],
)
def test_links_in_destinations_do_not_leave_the_root(
    runtime: Runtime, rootfs: Path, tmp_path: Path, canary: Canary, target: str
) -> None:
    """CVE-2021-30465, CVE-2024-45310 without a race: a folder of the image is a link to a folder of
    the host, and a tmpfs, a folder and a file are mounted beneath. The host's canary is untouched,
    and each mount is in the container's root."""
    (rootfs / "data").symlink_to(target.format(canary=canary.path))
    (tmp_path / "file").write_text("from the host\n")

    def change(config: Config) -> None:
        observed(config, runtime)
        config["mounts"] += [
            mount("/data/new/deep", "tmpfs", "marker"), bind(tmp_path / "file", "/data/passwd2"),
            bind(tmp_path, "/data/folder"),
            mount(f"/{CLIMB}/data/../data/up", "tmpfs", "marker"),
        ]  # fmt: skip

    result = runtime.run("true", change=change)
    if result.code == 0:
        assert outside_the_root((tmp_path / "table").read_text(), rootfs, "marker") == []


def test_a_destination_swapped_during_the_mount_stays_in_the_root(
    runtime: Runtime, rootfs: Path, probe: Path, tmp_path: Path, canary: Canary
) -> None:
    """CVE-2021-30465, CVE-2024-45310: two containers share a volume. The first swaps a folder with
    a link to the host's canary while the second is started with mounts beneath this folder. The
    canary is untouched, and each mount is in the container's root."""
    volume = tmp_path / "volume"
    (volume / "d").mkdir(parents=True)
    (volume / "link").symlink_to(canary.path)
    (rootfs / "etc/marker").write_text("")

    def change(config: Config) -> None:
        observed(config, runtime)
        config["mounts"] += [
            bind(volume, "/vol"), mount("/vol/d/x", "tmpfs", "marker"),
            mount("/vol/d/new/deeper", "tmpfs", "marker"),
            bind(rootfs / "etc/marker", "/vol/d/file"),
        ]  # fmt: skip

    slow = slowly(runtime, STEPS, 1)
    with Swapping(probe, volume / "d", volume / "link") as swaps:
        outcomes = [slow.run("true", change=change) for _ in range(6)]
    print(*outcomes)
    assert swaps.count > 1000
    runtime.run("true", change=change).ok()  # without an attack the mount works
    assert outside_the_root((tmp_path / "table").read_text(), rootfs, "marker") == []


def test_a_swapped_working_directory_stays_in_the_root(
    runtime: Runtime, rootfs: Path, probe: Path, tmp_path: Path, canary: Canary
) -> None:
    """CVE-2024-45310 by process.cwd: while the runtime makes the missing working directory, a
    folder on its path is swapped with a link to the host's canary. The canary is untouched."""
    volume = tmp_path / "volume"
    (volume / "d").mkdir(parents=True)
    (volume / "link").symlink_to(str(canary.path))

    def change(config: Config) -> None:
        config["mounts"].append(bind(volume, "/vol"))
        config["process"]["cwd"] = "/vol/d/made/here"

    slow = slowly(runtime, ["mkdirat", "chdir"], 2)
    with Swapping(probe, volume / "d", volume / "link"):
        for _ in range(4):
            result = slow.run("pwd", "-P", change=change)
            assert result.code or result.out.startswith(
                ("/vol/d/made/here", str(canary.path), "/")
            ), result


def test_tmpcopyup_copies_only_from_the_image(
    runtime: Runtime, rootfs: Path, canary: Canary
) -> None:
    """tmpcopyup copies the folder that a tmpfs covers, and the image has a link to the host's
    canary there. The canary is not opened, and the container has none of its content."""
    (rootfs / "data").symlink_to(canary.path)
    result = runtime.run(
        "sh",
        "-c",
        "cat /data/* 2>/dev/null",
        change=lambda c: c["mounts"].append(mount("/data", "tmpfs", "tmpfs", "tmpcopyup")),
    )
    assert "canary" not in result.out


def test_tmpcopyup_opens_no_special_files(runtime: Runtime, rootfs: Path, canary: Canary) -> None:
    """tmpcopyup copies a folder with a link, a pipe, a socket and a device. The runtime, which has
    no device filter, opens none of them, and links stay links."""
    data = rootfs / "data"
    data.mkdir()
    (data / "link").symlink_to(canary.path / "passwd")
    os.mkfifo(data / "pipe")
    # A device may be the machine's watchdog.
    os.mknod(data / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    with socket.socket(socket.AF_UNIX) as s:
        here = os.open(data, os.O_PATH)
        s.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    (data / "plain").write_text("plain\n")
    change = mount("/data", "tmpfs", "tmpfs", "tmpcopyup")
    result = runtime.run(
        "sh",
        "-c",
        "cat /data/plain; test -L /data/link && test -p /data/pipe && test -c /data/device"
        " && echo kept",
        change=lambda c: c["mounts"].append(change),
    )
    assert result.ok().out == "plain\nkept\n"


@pytest.mark.parametrize("destination", ["/", "//", "/.", "/..", "/x/..", "/../../.."])
def test_a_mount_over_the_root_is_refused(runtime: Runtime, destination: str) -> None:
    """A mount at `/`, or at a path that `..` leads to `/`, would replace the container's root.
    Create refuses the mount."""
    refused(runtime.run("true", change=lambda c: c["mounts"].append(mount(destination))), "root")


@pytest.mark.parametrize("place", ["/vol/d", "/data/./../data/x", "///data//y"])
def test_unusual_spellings_of_destinations_are_accepted(
    runtime: Runtime, tmp_path: Path, place: str
) -> None:
    """Only attacks are refused: a volume is mounted at a destination with an unusual but harmless
    spelling."""
    (tmp_path / "v").mkdir()
    (tmp_path / "v/file").write_text("volume\n")
    result = runtime.run(
        "cat", f"{place}/file", change=lambda c: c["mounts"].append(bind(tmp_path / "v", place))
    )
    assert result.ok().out == "volume\n"


def test_a_source_by_descriptor_is_not_looked_up_again(
    runtime: Runtime, probe: Path, tmp_path: Path, canary: Canary
) -> None:
    """Swapped sources (like CVE-2021-25741, kubelet's subPath): the caller passes a source as
    /proc/PID/fd/N, and an attacker swaps its name with a link to the host's canary. The container
    sees the folder of the descriptor, and the canary is untouched."""
    chosen, link = tmp_path / "chosen", tmp_path / "link"
    chosen.mkdir()
    (chosen / "mine").write_text("chosen\n")
    link.symlink_to(canary.path)
    number = os.open(chosen, os.O_PATH)
    try:
        slow = slowly(runtime, ["open_tree", "move_mount"], 1)
        with Swapping(probe, chosen, link):
            for _ in range(2):
                entry = bind(f"/proc/{os.getpid()}/fd/{number}", "/v")
                assert (
                    slow.run("cat", "/v/mine", change=lambda c, e=entry: c["mounts"].append(e))
                    .ok()
                    .out
                    == "chosen\n"
                )
    finally:
        os.close(number)


def exchanged(chosen: Path, canary: Canary) -> None:
    """Replace the folder `chosen` by a link to the canary."""
    chosen.rename(chosen.with_name("taken"))
    chosen.symlink_to(canary.path)


def test_a_source_swapped_during_create_is_not_mounted(
    runtime: Runtime, tmp_path: Path, canary: Canary
) -> None:
    """CVE-2021-25741: after `create` has looked up a source, and before the container's process
    opens it, the source's owner replaces it by a link to the host's canary. Create fails with the
    reason, and the canary is untouched."""
    chosen = tmp_path / "volume/chosen"
    chosen.mkdir(parents=True)
    box = runtime.box("sleep", "60", change=lambda c: c["mounts"].append(bind(chosen, "/v")))
    box.runtime = slowly(runtime, ["clone3", "clone", "vfork"], 2000)
    with ThreadPoolExecutor(1) as pool:
        creating = pool.submit(box.create)
        assert wait_until((runtime.root / box.id / "start.sock").exists, 60, 0.002), (
            creating.result()
        )
        exchanged(chosen, canary)
        refused(creating.result(), "no link")
    assert runtime("state", box.id).code != 0


def test_a_source_swapped_between_create_and_start_is_not_opened(
    runtime: Runtime, tmp_path: Path, canary: Canary
) -> None:
    """CVE-2021-25741 between `create` and `start`: `create` makes the mounts, and `start` opens
    none of their sources."""
    chosen, file = tmp_path / "chosen", tmp_path / "file"
    chosen.mkdir()
    (chosen / "mine").write_text("chosen\n")
    file.write_text("file\n")
    mounts = [bind(chosen, "/v"), bind(file, "/f"), bind(chosen, "/shared", "rshared")]
    box = runtime.box("sleep", "60", change=lambda c: c["mounts"].extend(mounts))
    box.create().ok()
    exchanged(chosen, canary)
    file.unlink()
    file.symlink_to(canary.path / "passwd")
    box.start().ok()
    assert box.exec("cat", "/v/mine", "/shared/mine", "/f").ok().out == "chosen\nchosen\nfile\n"


def test_links_in_sources_are_followed_by_create(runtime: Runtime, tmp_path: Path) -> None:
    """A source that is a link to a folder, a file or a device is accepted: the container sees the
    target that the link had during `create`."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("mine\n")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "name").symlink_to(tmp_path / "link/file")
    (tmp_path / "zero").symlink_to("/dev/zero")
    mounts = [
        bind(tmp_path / "link", "/v"),
        bind(tmp_path / "name", "/f"),
        bind(tmp_path / "zero", "/z"),
    ]
    script = "cat /v/file /f; head -c 3 /z | wc -c"
    assert (
        runtime.shell(script, change=lambda c: c["mounts"].extend(mounts)).out == "mine\nmine\n3\n"
    )


def test_mounts_of_the_container_do_not_reach_the_host(runtime: Runtime, tmp_path: Path) -> None:
    """A container with CAP_SYS_ADMIN mounts over its volumes and its root. None of these mounts
    appears in the host's mount table."""
    (tmp_path / "v").mkdir()
    before = Path("/proc/self/mountinfo").read_text()

    def change(config: Config) -> None:
        config["process"]["capabilities"] = {
            kind: ["CAP_SYS_ADMIN"] for kind in ("bounding", "effective", "permitted")
        }
        config["mounts"].append(bind(tmp_path / "v", "/v"))

    script = (
        "mount -t tmpfs x /v && mount -t tmpfs y /tmp && mount --bind / /root && cat"
        " /proc/self/mountinfo"
    )
    inside = runtime.shell(script, change=change).out
    assert " /v " in inside
    after = Path("/proc/self/mountinfo").read_text()
    assert not {line for line in after.splitlines() if str(tmp_path) in line} - set(
        before.splitlines()
    )
