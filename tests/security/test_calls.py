"""Attacks with system calls that a container must not be able to make, through any of the kernel's
system call tables.

Classes: seccomp bypass by the x32 and i386 tables, TIOCSTI (like CVE-2016-2568), keyrings (shared
session keys), calls that the server's default profile, capabilities and no-new-privileges allow.
"""

from __future__ import annotations

import json
import os
import platform
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cri_server.cli.output import formats, show
from cri_server.cli.output.template import Template
from pyrunc.seccomp.default import runtime_default
from pyrunc.spec.default import MASKED_PATHS, READONLY_PATHS
from tests.support.processes import wait_until
from tests.system.console import receive_terminal
from tests.system.harness import Runtime

Config = dict[str, Any]
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the other tables are x86's")


def denying(*names: str, architectures: list[str] | None = None) -> dict[str, Any]:
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": architectures or [f"SCMP_ARCH_{platform.machine().upper()}"],
        "syscalls": [{"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
    }  # fmt: skip


@x86
@pytest.mark.parametrize("where", ["run", "exec"])
def test_a_filter_covers_the_x32_and_i386_tables(runtime: Runtime, where: str) -> None:
    """Seccomp bypass: the filter denies mkdir for x86-64, and the container calls mkdir by its x32
    number and through the i386 gate. No folder is made: the kernel kills a process that uses a
    table that the profile does not name."""

    def call(how: str, profile: dict[str, Any] | None) -> tuple[int, str]:
        words = ("sh", "-c", f"probe call {how} /dev/shm/made; echo $?; ls /dev/shm")
        linux = {"seccomp": profile} if profile else {}
        if where == "run":
            result = runtime.run(*words, **linux)
        else:
            result = runtime.box("sleep", "60", **linux).up().exec(*words)
        return result.code, result.out

    assert call("native", denying("mkdir"))[1] == "native EPERM\n0\n"
    for how in ("x32", "i386"):
        out = call(how, denying("mkdir"))[1]
        # 128 + SIGSYS
        assert out.splitlines() == ["159"], (how, out)
    both = denying("mkdir", architectures=["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"])
    assert call("i386", both)[1] == "i386 EPERM\n0\n"
    assert call("x32", both)[1] == "x32 EPERM\n0\n"
    # Without a filter the i386 call makes the folder.
    assert call("i386", None)[1] == "i386 DONE\n0\nmade\n"


def test_a_container_cannot_type_into_the_callers_terminal(runtime: Runtime) -> None:
    """TIOCSTI: a container without its own terminal gets the caller's as stdin, types a command
    into it and tries to make it its controlling terminal (TIOCSCTTY). Both calls fail with EPERM,
    and the terminal has no input."""
    box, probe = runtime.box("probe", "type", "echo evil\n"), runtime.rootfs / "bin/probe"
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    results = {}
    for name, words in (("own", [str(probe), "type", "x"]), ("container", command)):
        pid, master = pty.fork()
        if not pid:
            out = os.open(runtime.folder / f"{name}.tty", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.execv(words[0], words)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        try:
            echoed = os.read(master, 100)
        except OSError:  # EIO: no process has it open, and nothing is left to read
            echoed = b""
        os.close(master)
        results[name] = ((runtime.folder / f"{name}.tty").read_text().splitlines(), echoed)
    assert results["container"] == (["sti EPERM", "sctty EPERM"], b"")
    # The kernel permits TIOCSTI to the terminal's own session.
    if int(Path("/proc/sys/dev/tty/legacy_tiocsti").read_text()):
        assert results["own"][0][0] == "sti DONE"


def test_a_container_types_only_into_its_own_terminal(runtime: Runtime, tmp_path: Path) -> None:
    """TIOCSTI by a container with a terminal: typed bytes reach only its own pty, which is the only
    terminal in its /dev/pts."""
    change = {"terminal": True}
    box = runtime.box(
        "sh",
        "-c",
        "ls /dev/pts; probe type x; echo end",
        change=lambda c: c["process"].update(change),
    )
    with receive_terminal(tmp_path / "c") as console:
        box.create("--console-socket", str(console.path)).ok()
        box.start().ok()
        lines = console.read_until(b"end").decode().split()
    assert lines[:2] == ["0", "ptmx"]


@x86
def test_a_container_cannot_find_keys_of_the_caller(runtime: Runtime) -> None:
    """Keyrings: the caller has a key in its session keyring, and the container has the same uid. A
    search for the key by the container fails with ENOKEY, by run and exec."""
    script = (
        "import ctypes, os, sys; l = ctypes.CDLL(None); l.syscall(250, 1, b'callers-session', 0, 0,"
        " 0); l.syscall(248, b'user', b'callers-secret', b'x', 1, -3); os.execv(sys.argv[1],"
        " sys.argv[1:])"
    )
    wrapped = Runtime(runtime.folder, runtime.rootfs)
    wrapped.ids = runtime.ids
    wrapped.program = ["/usr/bin/python3", "-c", script, *runtime.program]
    search = ("probe", "key", "callers-secret")
    box = wrapped.box("sleep", "60").up()
    assert wrapped.run(*search).ok().out == "key ENOKEY\n"
    assert wrapped("exec", box.id, *search).ok().out == "key ENOKEY\n"
    # In the caller's keyring the search succeeds, which proves that the key exists.
    open_box = wrapped.box(*search)
    result = wrapped("run", "--no-new-keyring", "--bundle", str(open_box.folder), open_box.id)
    assert result.ok().out == "key DONE\n"


CONTAINED = """
ATTEMPT() { name=$1; shift; "$@" >/dev/null 2>&1 && echo "OPEN $name"; }
ATTEMPT mount mount -t tmpfs x /tmp
ATTEMPT unshare-mount unshare -m true
ATTEMPT unshare-user unshare -U true
ATTEMPT hostname hostname evil
ATTEMPT chroot chroot / true
ATTEMPT mknod mknod /tmp/disk b 8 0
ATTEMPT sysrq sh -c 'echo h > /proc/sysrq-trigger'
ATTEMPT core sh -c 'echo x > /proc/sys/kernel/core_pattern'
ATTEMPT dmesg dmesg
ATTEMPT nice nice -n -5 true
ATTEMPT insmod insmod /bin/busybox
ATTEMPT reboot reboot -f
ATTEMPT swapoff swapoff /tmp
ATTEMPT setns nsenter -t 1 -n true
ATTEMPT kcore dd if=/proc/kcore of=/dev/null bs=1 count=1 conv=sync
true
"""


def test_attempts_of_a_container_with_default_settings_fail(runtime: Runtime) -> None:
    """A container has the default seccomp profile and the capabilities, read-only and masked paths
    of `pyrunc spec`. Its attempts to mount, reboot, load modules, … fail, and the host's name stays
    the same."""
    profile = runtime_default([], platform.machine())
    out = runtime.shell(
        CONTAINED, seccomp=profile, maskedPaths=[*MASKED_PATHS], readonlyPaths=READONLY_PATHS
    ).out
    kinds = [
        line for line in out.splitlines() if line.startswith("OPEN") and line not in ("OPEN kcore",)
    ]
    # A fixture checks the host's name around each test.
    assert kinds == [], out


@x86
def test_closed_socket_families_cannot_be_opened(runtime: Runtime) -> None:
    """CVE-2026-31431: the attacker opens AF_ALG and AF_VSOCK sockets by socket(2) of the x86-64 and
    i386 tables and by i386's socketcall(2). Each call fails, while socket(2) still opens AF_UNIX
    sockets."""
    profile = runtime_default([], platform.machine())
    # AF_ALG and AF_VSOCK. The family of socketcall(2) lies behind a pointer that no filter can
    # follow.
    for family in (38, 40):
        out = runtime.shell(f"probe sockets {family}; true", seccomp=profile).out.splitlines()
        assert out[:3] == ["native EPERM", "i386 EPERM", "socketcall ENOSYS"], out
    # AF_UNIX. For existing sockets socketcall(2) still works: EINVAL comes from listen.
    out = runtime.shell("probe sockets 1; true", seccomp=profile).out.splitlines()
    assert out == ["native DONE", "i386 DONE", "socketcall ENOSYS", "listen EINVAL"], out
    assert runtime.shell("probe sockets 1; true").out.splitlines()[2] == "socketcall DONE", (
        "the attack works"
    )


def test_no_new_privileges_applies_to_exec(runtime: Runtime, rootfs: Path) -> None:
    """An ordinary user runs a set-user-ID program of the image under no_new_privs. The effective
    uid stays 1000, by run and exec; without no_new_privs it becomes 0."""
    program = rootfs / "bin/suid"
    program.write_bytes((rootfs / "bin/probe").read_bytes())
    program.chmod(0o4755)
    for nnp, expected in ((True, "1000"), (False, "0")):

        def change(config: Config, nnp: bool = nnp) -> None:
            config["process"].update(user={"uid": 1000, "gid": 1000}, noNewPrivileges=nnp)

        words = ("sh", "-c", "suid uid; grep NoNewPrivs /proc/self/status | tr -d -c 01")
        assert runtime.run(*words, change=change).ok().out == f"{expected}\n{int(nnp)}"
        box = runtime.box("sleep", "60", change=change).up()
        assert box.exec(*words).ok().out == f"{expected}\n{int(nnp)}"


def test_errors_have_no_escape_sequences_of_a_container(runtime: Runtime) -> None:
    """Arguments, working directories and variables with terminal escape sequences appear in error
    messages. No control character reaches the caller's terminal or the log."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\nlevel=info msg=fake"
    log = runtime.folder / "log.json"
    for change in ({"args": [evil]}, {"cwd": "/" + evil}, {"env": [evil.replace("=", "")]}):
        box = runtime.box("true", change=lambda c, change=change: c["process"].update(change))
        result = runtime(
            "run",
            "--bundle",
            str(box.folder),
            box.id,
            options=["--log", str(log), "--log-format", "json"],
        )
        assert result.code != 0 or "cwd" in change
        for text in (result.err, log.read_text() if log.exists() else ""):
            assert not [c for c in text if ord(c) < 32 and c != "\n"], repr(text)
        assert len(result.err.splitlines()) <= 1, result


def test_tables_have_no_escape_sequences_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of processes and names of images contain terminal escape sequences. `pyrunc-cri`
    prints none of their control characters in tables and JSON, and columns stay aligned."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m"
    with subprocess.Popen(["sh", "-c", "read x", evil], stdin=subprocess.PIPE) as process:
        arguments = Path(f"/proc/{process.pid}/cmdline")
        # it has closed its files, but not yet executed the shell
        assert wait_until(arguments.read_bytes, 60, 0.01)
        lines = [
            *show.processes([("c", process.pid)]),
            *formats.table(("NAME", "STATE"), [(evil, "up")]).splitlines(),
        ]
        assert process.stdin is not None
        process.stdin.close()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines += formats.OutputOptions(format="json").document({evil: evil}).splitlines()[1:2]
    assert json.loads(f"{{{lines[3]}}}") == {evil: evil}
    lines.append(
        formats.OutputOptions(template=Template("{{.name}}")).document(
            {"name": evil.replace("\n", "")}
        )
    )
    assert len(lines) == 5 and lines[0].endswith("\\x9b31m") and lines[2].endswith("  up"), lines
    assert not [c for line in lines for c in line if not c.isprintable()], lines
