"""Attacks on the identity of processes: users must be numbers, groups and capabilities exactly
those of the configuration.

Classes: CVE-2022-24769, 27649, 27650, 27652, 29162, CVE-2025-27612 (inheritable capabilities),
CVE-2026-30892 (exec --user), CVE-2022-2995, CVE-2023-25173 (groups), CVE-2022-1708 kin (HOME),
CVE-2025-4437, CVE-2026-47262 (hostile /etc/passwd).
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.security.attack import Canary
from tests.system.harness import Runtime

Config = dict[str, Any]
DOCKER = [f"CAP_{name}" for name in (
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP",
    "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "KILL", "AUDIT_WRITE")]  # fmt: skip
STATUS = ("grep", "-E", "^(Cap|Uid|Gid|Groups)", "/proc/self/status")


def sets(text: str) -> dict[str, int]:
    return {
        name: int(value, 16)
        for name, value in re.findall(r"^(Cap\w+):\s+([0-9a-f]+)$", text, re.MULTILINE)
    }


def docker(config: Config) -> None:
    config["process"]["capabilities"] = dict.fromkeys(
        ("bounding", "effective", "permitted"), DOCKER
    )


def test_no_capability_is_inheritable(runtime: Runtime) -> None:
    """CVE-2022-24769, CVE-2022-29162: a process with Docker's capabilities has no inheritable and
    no ambient capability (CapInh, CapAmb), by run, by exec, as another user and with exec --cap."""
    assert sets(runtime.run(*STATUS, change=docker).ok().out)["CapInh"] == 0
    box = runtime.box("sleep", "60", change=docker).up()
    for options in (
        [],
        ["--user", "1000"],
        ["--cap", "CAP_SYS_ADMIN"],
        ["--cap", "CAP_NET_RAW", "--user", "1000:1000"],
    ):
        result = sets(box.exec(*STATUS, options=options).ok().out)
        assert result["CapInh"] == result["CapAmb"] == 0, (options, result)
        if options[:2] == ["--cap", "CAP_SYS_ADMIN"]:
            assert result["CapEff"] >> 21 & 1 and result["CapBnd"] >> 21 & 1


def test_a_file_with_an_inheritable_capability_adds_no_capability(
    runtime: Runtime, rootfs: Path
) -> None:
    """CVE-2022-24769, the effect: an ordinary user runs a file of the image that has the
    inheritable capability cap_net_raw+ei. After execve the process has no capability."""
    busybox = (rootfs / "bin/busybox").read_bytes()
    for name, permitted, inheritable in (("inherits", 0, 1 << 13), ("permits", 1 << 13, 0)):
        program = rootfs / name / "cat"
        program.parent.mkdir()
        program.write_bytes(busybox)
        program.chmod(0o755)
        # struct vfs_cap_data of linux/capability.h
        words = (0x02000001, permitted, inheritable, 0, 0)
        os.setxattr(
            program, "security.capability", b"".join(w.to_bytes(4, "little") for w in words)
        )

    def change(config: Config) -> None:
        docker(config)
        config["process"].update(user={"uid": 1000, "gid": 1000}, noNewPrivileges=False)

    # The permitted capability proves that the kernel reads the attribute.
    for name, expected in (("inherits", 0), ("permits", 1 << 13)):
        result = sets(runtime.run(f"/{name}/cat", "/proc/self/status", change=change).ok().out)
        assert result["CapEff"] == result["CapPrm"] == expected, (name, result)


@pytest.mark.parametrize("user", [0, 1000])
def test_the_kernel_shows_the_configured_capabilities(runtime: Runtime, user: int) -> None:
    """For root and a user, with and without ambient capabilities, the kernel's capability sets
    equal those of the configuration. An ambient capability that is not inheritable is not
    raised."""
    one, two, three = "CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"
    for permitted, inheritable, ambient, expected in (
        ([], [], [], (0, 0)),
        ([one, two], [], [], (0b100001 if user == 0 else 0, 0)),
        ([one, two], [], [two], (0b100001 if user == 0 else 0, 0)),
        ([one, two], [two], [two], (0b100001 if user == 0 else 0b100000, 0b100000)),
    ):
        configured = {"bounding": [one, two, three], "permitted": permitted,
            "effective": permitted, "inheritable": inheritable, "ambient": ambient}  # fmt: skip

        def change(config: Config, configured: dict[str, list[str]] = configured) -> None:
            config["process"].update(
                user={"uid": user, "gid": user}, capabilities=configured, noNewPrivileges=True
            )

        result = sets(runtime.run(*STATUS, change=change).ok().out)
        assert result["CapBnd"] == 1 << 0 | 1 << 5 | 1 << 13
        assert result["CapAmb"] == expected[1]
        # root's execve fills its sets from the bounding set (capabilities(7))
        if user or not permitted:
            assert result["CapEff"] == expected[0] or (user == 0 and not permitted), result


WRONG_USERS = [
    "0x10", "1 ", " 1", "+1", "-1", "-0", "4294967295", "4294967296", "18446744073709551616",
    "1:2:3", "\u0661", "1_0", "1.0", "1e3",
    ":", ":1", "1:", "1:-1", "1:4294967295", "root", "user", "1000\n0", "\u00b2",
    "99999999999999999999999999999999999999", "0b1",
]  # fmt: skip


def test_a_user_must_be_a_whole_number(runtime: Runtime) -> None:
    """CVE-2026-30892: a user that is only partly parsed becomes another user, mostly root. `exec
    --user` refuses such texts with exit code 255, and no process runs; whole numbers become exactly
    that uid."""
    box = runtime.box("sleep", "60").up()
    for text in WRONG_USERS:
        result = box.exec("touch", "/dev/shm/ran", options=["--user", text])
        assert result.code == 255, (text, result)
    assert box.exec("ls", "/dev/shm").ok().out == ""
    for text, uid in (
        ("1", 1),
        ("01", 1),
        ("4294967294", 4294967294),
        ("2147483648:7", 2147483648),
    ):
        out = box.exec(*STATUS, options=["--user", text]).ok().out
        assert re.search(rf"^Uid:\t{uid}\t{uid}\t{uid}\t{uid}$", out, re.MULTILINE), out


@pytest.mark.parametrize(
    "user", [{"uid": True}, {"uid": -1}, {"uid": 4294967296}, {"uid": 4294967295}, {"uid": "0"},
    {"uid": 1.5}, {"uid": 1e3},
             {"gid": 2**64}, {"additionalGids": [-1]}, {"additionalGids": [2**32]},
             {"additionalGids": "0"}, {"uid": None, "gid": []}]
)  # fmt: skip
def test_ids_of_the_configuration_must_be_32_bit_integers(
    runtime: Runtime, user: dict[str, Any]
) -> None:
    """Booleans, floats, texts and numbers over 32 bits are no ids, and none is cut to 32 bits: the
    runtime refuses the configuration with one line of error."""
    # null alone would mean the default.
    result = runtime.run("id", "-u", change=lambda c: c["process"].update(user=user))
    assert (
        result.code != 0 and "Traceback" not in result.err and len(result.err.splitlines()) == 1
    ), result


def test_the_kernel_shows_the_configured_groups(runtime: Runtime) -> None:
    """CVE-2022-2995, CVE-2023-25173: the caller has supplementary groups, and the image's
    /etc/group lists the user in another. The process has only the configured groups, by run and
    exec."""

    def change(config: Config) -> None:
        config["process"]["user"] = {"uid": 1000, "gid": 1000, "additionalGids": [7]}

    (runtime.rootfs / "etc/group").write_text("root:x:0:user\ndisk:x:6:user\n")
    wrapped = Runtime(runtime.folder, runtime.rootfs)
    wrapped.ids = runtime.ids
    wrapped.program = ["setpriv", "--groups", "0,6,27", "--", *runtime.program]
    assert re.search(r"^Groups:\t7 $", wrapped.run(*STATUS, change=change).ok().out, re.MULTILINE)
    box = wrapped.box("sleep", "60", change=change).up()
    assert re.search(r"^Groups:\t7 $", wrapped("exec", box.id, *STATUS).ok().out, re.MULTILINE)
    assert re.search(r"^Groups:\t8 $", wrapped("exec", "--additional-gids", "8", "--user", "0:0",
        box.id, *STATUS).out.replace("7 8", "8"), re.MULTILINE)  # fmt: skip


# ---- /etc/passwd


def test_home_with_a_newline_adds_no_account(runtime: Runtime) -> None:
    """CVE-2022-4318, like CVE-2022-1708: HOME, from the environment or from /etc/passwd, has a line
    break. The image's /etc/passwd stays the same, and HOME stays a single variable."""
    passwd = runtime.rootfs / "etc/passwd"
    passwd.write_bytes(
        b"root:x:0:0:root:/root\x0broot2::0:0:\x1e/:/bin/sh\nuser:x:1000:1000::/h\rEVIL=1:/bin/sh\n"
    )
    before = passwd.read_bytes()
    show = ("cat", "/proc/self/environ")
    home = "HOME=/x\nroot2::0:0"
    result = runtime.run(*show, change=lambda c: c["process"]["env"].append(home)).ok()
    assert home in result.out.split("\0")
    result = runtime.run(
        *show, change=lambda c: c["process"].update(user={"uid": 1000, "gid": 1000})
    ).ok()
    assert "EVIL=1" not in result.out.split("\0")
    assert passwd.read_bytes() == before


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 30)


def _long_line(path: Path) -> None:
    path.write_bytes(b"root:" + b"x" * (3 << 20) + b":0:0::/:\n")


@pytest.mark.parametrize(
    "kind", ["pipe", "device", "zero", "folder", "loop", "host", "sparse", "line", "socket link"]
)
def test_a_hostile_passwd_does_no_harm(
    runtime: Runtime, rootfs: Path, canary: Canary, kind: str
) -> None:
    """CVE-2025-4437, CVE-2026-47262: the image's /etc/passwd, in which the runtime looks for HOME,
    is a pipe, a device, a gigabyte, or a link to the host. The container starts in limited time and
    memory with HOME=/, and neither the device nor the host's canary is opened."""
    passwd = rootfs / "etc/passwd"
    passwd.unlink()
    watched: list[Path] = []
    if kind == "pipe":
        os.mkfifo(passwd)
    elif kind in ("device", "zero"):
        os.mknod(passwd, stat.S_IFCHR | 0o666, os.makedev(1, 5 if kind == "zero" else 8))
        watched.append(passwd)
    elif kind == "folder":
        passwd.mkdir()
    elif kind in ("sparse", "line"):
        (_sparse if kind == "sparse" else _long_line)(passwd)
    else:
        passwd.symlink_to(
            {"loop": "passwd", "host": canary.path / "passwd", "socket link": "/proc/self/fd/0"}[
                kind
            ]
        )
    events = Canary.watch(watched)
    box = runtime.box("sh", "-c", "echo $HOME")
    start = time.monotonic()
    command = [
        "/usr/bin/env",
        "bash",
        "-c",
        'ulimit -v 400000; exec "$@"',
        "-",
        *runtime.command(),
    ]
    result = subprocess.run(
        [*command, "run", "--bundle", box.folder, box.id],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - start < 60
    assert result.returncode == 0 and result.stdout == "/\n", result
    assert Canary.seen(events) == b""
