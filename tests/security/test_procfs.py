"""Attacks on the runtime's writes to procfs, which must reach the real procfs: no other folder may
pass for /proc.

Classes: CVE-2019-16884 (a volume over /proc), CVE-2019-19921, CVE-2023-27561, CVE-2023-28642,
CVE-2025-54867 (/proc or /sys as a symbolic link of the image), CVE-2025-52881 and CVE-2025-62596
(writes redirected to another file), CVE-2022-0811 (smuggled sysctls).

The defence: procfs is mounted on a directory that no link leads to, sysctls are written through a
procfs that only the runtime has, and no mount lands inside a procfs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyrunc.spec.default import MASKED_PATHS, READONLY_PATHS
from tests.security.attack import Canary, Swapping, bind, mount, refused, slowly, traced
from tests.system.harness import Runtime

Config = dict[str, Any]
SHOW_PROC = "stat -f -c %T /proc; cat /proc/self/mountinfo"


def fake_proc(folder: Path) -> Path:
    """Make a folder whose files look like a procfs; only statfs(2) shows the difference."""
    for name in ("attr", "attr/apparmor"):
        (folder / "self" / name).mkdir(parents=True, exist_ok=True)
    for name in ("attr/exec", "attr/current", "attr/apparmor/exec", "setgroups", "oom_score_adj"):
        (folder / "self" / name).write_text("")
    (folder / "thread-self").symlink_to("self")
    (folder / "sys/net/ipv4").mkdir(parents=True)
    (folder / "sys/net/ipv4/ip_forward").write_text("fake\n")
    (folder / "sys/kernel").mkdir()
    (folder / "sys/kernel/core_pattern").write_text("fake\n")
    return folder


# ---- /proc and /sys as links


@pytest.mark.parametrize("name", ["proc", "sys"])
@pytest.mark.parametrize(
    "target",
    [
        "/elsewhere",
        "elsewhere",
        "/",
        "/no/such",
        "../../../../../../../tmp",
        "{canary}",
        "/etc/passwd",
    ],
)
def test_proc_as_a_link_of_the_image_is_refused(
    runtime: Runtime, rootfs: Path, canary: Canary, name: str, target: str
) -> None:
    """CVE-2019-19921, CVE-2023-27561, CVE-2023-28642, youki CVE-2025-54867: the image's /proc or
    /sys is a symbolic link to another folder, to a missing path, to the root, or to the host.
    Create fails with the reason, and the host's canary is untouched."""
    (rootfs / "elsewhere").mkdir()
    (rootfs / name).rmdir()
    (rootfs / name).symlink_to(target.format(canary=canary.path))
    refused(runtime.run("true"), "must be mounted on ordinary directory")


def test_proc_swapped_with_a_link_is_not_followed(
    runtime: Runtime, rootfs: Path, probe: Path, canary: Canary
) -> None:
    """CVE-2019-19921 with a race: a second container on the same root swaps /proc with a link while
    the runtime mounts procfs. Procfs is never mounted at the link's target."""
    fake = fake_proc(rootfs / "fake")
    (rootfs / "proc-link").symlink_to("/fake")
    slow, started = slowly(runtime, ["move_mount"], 3), 0
    with Swapping(probe, rootfs / "proc", rootfs / "proc-link") as swaps:
        for _ in range(4):
            result = slow.run("sh", "-c", SHOW_PROC)
            if result.code:
                refused(
                    result,
                    "must be mounted on ordinary directory",
                    "too many levels",
                    "ENOTDIR",
                    "ELOOP",
                    "proc",
                )
                continue
            started += 1
            _kind, *table = result.out.splitlines()
            points = [
                line.split()[4] for line in table if " - proc " in line and line.split()[3] == "/"
            ]
            assert points == ["/proc"] or all(p in ("/proc", "/proc-link") for p in points), points
    assert swaps.count > 100
    assert (fake / "self/attr/exec").read_text() == ""


# ---- mounts over and inside /proc


@pytest.mark.parametrize(
    "destination", ["/proc", "/proc/", "//proc/.", "/x/../proc", "/proc/self", "/proc/sys",
    "/proc/1", "/proc/self/attr",
                    "/proc/sys/kernel", "/proc/../proc/self", "/proc/kcore", "/proc/uptime/../self"]
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bind", "tmpfs"])
def test_a_volume_over_proc_is_refused(
    runtime: Runtime, tmp_path: Path, destination: str, kind: str
) -> None:
    """CVE-2019-16884: the image demands a volume at /proc or inside, with files that look like a
    procfs, so that the runtime would write labels there. Create fails."""
    fake = fake_proc(tmp_path / "fake")
    entry = bind(fake, destination) if kind == "bind" else mount(destination)
    result = runtime.run("true", change=lambda config: config["mounts"].append(entry))
    refused(
        result,
        "cannot be mounted because it is not of type proc",
        "cannot be mounted because it is inside /proc",
    )


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("kind", ["bind", "tmpfs"])
@pytest.mark.parametrize(
    "link", ["/proc/self", "/proc/sys", "/proc/1/attr", "../proc/sys/kernel", "/proc"]
)
def test_a_volume_that_a_link_leads_into_proc_is_refused(
    runtime: Runtime, rootfs: Path, tmp_path: Path, kind: str, link: str, prepared: bool
) -> None:
    """CVE-2019-16884 through a link: a volume is mounted at /data, which the image makes a link to
    /proc/…, so that a check of the text /data finds nothing. Create fails."""
    (rootfs / "data").symlink_to(link)
    # The link leads to a folder of the image before procfs is mounted.
    if prepared and link != "/proc":
        (rootfs / ("proc/" + link.partition("proc/")[2])).mkdir(parents=True)
    entry = bind(fake_proc(tmp_path / "fake"), "/data") if kind == "bind" else mount("/data", kind)
    result = runtime.run(
        "cat", "/proc/self/mountinfo", change=lambda config: config["mounts"].append(entry)
    )
    refused(
        result,
        "cannot be mounted because it is inside /proc",
        "cannot be mounted because it is not of type proc",
    )


def test_a_bind_over_proc_may_be_a_procfs(runtime: Runtime) -> None:
    """CVE-2019-16884 concerns only sources that are no procfs: a bind of a procfs over /proc is
    accepted."""

    def change(config: Config) -> None:
        config["mounts"][0] = bind("/proc", "/proc")
        config["linux"]["namespaces"] = [
            n for n in config["linux"]["namespaces"] if n["type"] != "pid"
        ]

    assert runtime.run("stat", "-f", "-c", "%T", "/proc", change=change).ok().out == "proc\n"


# ---- sysctls


def test_sysctls_are_not_written_through_the_containers_proc(
    runtime: Runtime, rootfs: Path, tmp_path: Path
) -> None:
    """CVE-2025-52881: a hook covers ip_forward in the container's /proc with a file, as a racing
    mount would. The runtime sets the sysctl through another procfs, and the file stays
    unchanged."""
    (rootfs / "fake").write_text("fake\n")
    (rootfs / "other").mkdir()
    hook = tmp_path / "cover"
    hook.write_text(
        "#!/bin/sh\npid=$(sed -n 's/.*\"pid\": *\\([0-9]*\\).*/\\1/p')\n"
        "nsenter -m -n -t $pid /bin/busybox mount --bind /fake /proc/sys/net/ipv4/ip_forward\n"
    )
    hook.chmod(0o755)

    def change(config: Config) -> None:
        config["linux"]["sysctl"] = {"net.ipv4.ip_forward": "1"}
        config["hooks"] = {"createRuntime": [{"path": str(hook), "env": ["PATH=/usr/bin:/bin"]}]}
        config["mounts"].append(mount("/other", "proc"))

    result = runtime.run(
        "cat", "/proc/sys/net/ipv4/ip_forward", "/other/sys/net/ipv4/ip_forward", change=change
    )
    assert result.ok().out == "fake\n1\n"
    assert (rootfs / "fake").read_text() == "fake\n"


def test_sysctls_are_written_through_a_detached_procfs(runtime: Runtime, tmp_path: Path) -> None:
    """CVE-2025-52881: the runtime opens a sysctl's file beneath the root of a detached procfs,
    across no mount and no link. It opens no file by a path below the container's /proc."""
    log = tmp_path / "calls"
    watched = traced(runtime, log, "openat,openat2,write,pivot_root")
    linux = {"sysctl": {"net.ipv4.ip_forward": "1"}}
    box = watched.box("true", **linux)
    watched("run", "--bundle", str(box.folder), box.id).ok()
    text = log.read_text()
    (opened,) = re.findall(r'openat2\((\d+)<([^>]*)>, "sys/net/ipv4/ip_forward", \{([^}]*)\}', text)
    assert opened[1] == "/", opened  # the root of a detached mount
    for word in (
        "RESOLVE_BENEATH",
        "RESOLVE_NO_SYMLINKS",
        "RESOLVE_NO_XDEV",
        "RESOLVE_NO_MAGICLINKS",
    ):
        assert word in opened[2]
    inside = re.search(r"^(\d+) +pivot_root", text, re.MULTILINE)
    assert inside is not None
    after = [line for line in text[inside.end() :].splitlines() if line.startswith(inside[1])]
    assert after and not any('"/proc/' in line for line in after), after


@pytest.mark.parametrize(
    "op", ["SetExecLabel('apparmor', 'x')", "SetExecLabel('selinux', 'x')", "SetOomScore(500)",
    "OffsetClocks((('monotonic', 9, 0),))"]
)  # fmt: skip
def test_the_launcher_refuses_a_proc_that_is_no_procfs(tmp_path: Path, op: str) -> None:
    """CVE-2019-16884, CVE-2023-28642, CVE-2025-52881: the launcher is to write labels, OOM score
    and clock offsets in a joined mount namespace, where /proc is a folder with files of the same
    names. The launcher refuses, and the files stay empty."""
    fake = fake_proc(tmp_path / "fake")
    for name in ("attr/keycreate", "timens_offsets"):
        (fake / "self" / name).write_text("")
    for name in ("fd", "ns", "status"):  # ours, for Python
        (fake / "self" / name).symlink_to(f"{tmp_path}/real/self/{name}")
    (tmp_path / "real").mkdir()
    program = (
        "from pyrunc.plan.lower import lower\nfrom pyrunc.plan.model import *\nfrom"
        f" pyrunc.program.launch import launch\nrunning = launch(lower(Plan((Prepare(), {op},"
        " Ready()))).program, stdio=(0, 1, 2), fds={})\ntry:\n while running.receive() is not"
        " None: pass\nfinally: running.close()\n"
    )
    script = (
        f"mount --bind /proc {tmp_path}/real && mount --bind {fake} /proc && exec {sys.executable}"
        ' -c "$0"'
    )
    # No security module is needed: the launcher checks /proc before it writes.
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1 and "/proc is no procfs" in result.stderr, result.stderr
    assert not any((fake / "self" / name).read_text() for name in ("attr/exec",
        "attr/apparmor/exec", "oom_score_adj",
                                                                   "attr/keycreate",
                                                                   "timens_offsets"))  # fmt: skip


def test_files_of_the_process_are_written_beneath_proc_without_links(
    runtime: Runtime, tmp_path: Path
) -> None:
    """CVE-2025-52881: another file of procfs could be bound over the intended one. The launcher
    opens the file beneath /proc across no mount and no magic link, before it enters a namespace of
    the container."""
    log = tmp_path / "calls"
    watched = traced(runtime, log, "openat2,clone3,setns")
    change = {"oomScoreAdj": 321}
    box = watched.box(
        "cat", "/proc/self/oom_score_adj", change=lambda c: c["process"].update(change)
    )
    assert watched("run", "--bundle", str(box.folder), box.id).ok().out == "321\n"
    text = log.read_text()
    (opened,) = re.findall(r'openat2\(\d+<([^>]*)>, "self/oom_score_adj", \{([^}]*)\}', text)
    assert opened[0] == "/proc"
    for word in ("RESOLVE_BENEATH", "RESOLVE_NO_XDEV", "RESOLVE_NO_MAGICLINKS"):
        assert word in opened[1]
    assert text.index("oom_score_adj") < text.index("CLONE_NEWNS")


@pytest.mark.parametrize(
    "key",
    [
        "kernel.core_pattern", "kernel/core_pattern", "net.ipv4..//../kernel/core_pattern",
        "net/../kernel/core_pattern",
        "net.ipv4/../../kernel/core_pattern", "net/ipv4/../../../self/attr/exec",
        "../sys/kernel/core_pattern", "net./kernel",
        "kernel.shm_rmid_forced/../core_pattern", "fs.mqueue./../../kernel.core_pattern", "net",
        "", ".", "/", "kernel.modprobe",
        "vm.overcommit_memory", "net.ipv4.ip_forward\0",
        "kernel.shm_rmid_forced=1+kernel.core_pattern",
    ],
)  # fmt: skip
def test_sysctls_of_the_machine_are_refused(runtime: Runtime, key: str) -> None:
    """CVE-2022-0811 and CVE-2025-52881: names of sysctls climb by `..`, mix separators or name
    settings of the machine. Create fails, and core_pattern and similar settings stay the same."""
    # A fixture checks the settings around each test.
    refused(runtime.run("true", sysctl={key: "|/evil"}))


@pytest.mark.parametrize(
    "value", ["1+kernel.core_pattern=|/evil", "1\nkernel.core_pattern=|/evil", "1\0", "1=2"]
)
def test_a_sysctls_value_with_a_second_setting_is_refused(runtime: Runtime, value: str) -> None:
    """CVE-2022-0811 (cr8escape): CRI-O joined all sysctls with `+`, so that a value could contain a
    second setting. Create fails, and core_pattern stays the same."""
    refused(runtime.run("true", sysctl={"kernel.shm_rmid_forced": value}))


def test_a_sysctl_needs_a_namespace_of_the_container(runtime: Runtime) -> None:
    """If a container shares a namespace with the host, a sysctl of this namespace would change the
    host. Create refuses the sysctl."""
    kinds = [{"type": kind} for kind in ("pid", "mount", "cgroup")]
    for key in (
        "net.ipv4.ip_forward",
        "kernel.shm_rmid_forced",
        "fs.mqueue.msg_max",
        "kernel.domainname",
    ):
        refused(runtime.run("true", sysctl={key: "1"}, namespaces=kinds), "namespace")


# ---- what the container sees


def test_a_container_has_only_its_own_procfs(runtime: Runtime) -> None:
    """The runtime mounts a separate procfs to write sysctls. The container has no descriptor of
    that procfs, and its /proc shows only the container's processes."""
    script = "ls /proc/self/fd | wc -l; ls -d /proc/[0-9]* | wc -l; cat /proc/1/comm"
    out = runtime.shell(script, sysctl={"net.ipv4.ip_forward": "1"}).out
    assert out.split()[0] == "4" and int(out.split()[1]) <= 4, out


def test_a_container_cannot_write_to_the_machines_part_of_proc(runtime: Runtime) -> None:
    """With the masked and read-only paths of `pyrunc spec`, root of the container cannot write to
    settings of the machine in /proc."""
    places = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/modprobe",
        "/proc/irq/default_smp_affinity",
              "/proc/sys/vm/panic_on_oom", "/proc/fs", "/proc/bus"]  # fmt: skip
    script = "".join(f"[ -e {p} ] && (echo x > {p}) 2>/dev/null && echo OPEN {p};" for p in places)
    out = runtime.shell(
        script + "wc -c < /proc/kcore; wc -c < /proc/keys; true",
        maskedPaths=MASKED_PATHS,
        readonlyPaths=READONLY_PATHS,
    ).out
    assert "OPEN" not in out and set(out.split()) <= {"0"}, out


def test_a_container_cannot_mount_an_uncovered_procfs(runtime: Runtime) -> None:
    """A new procfs, mounted with CAP_SYS_ADMIN in a new user namespace, would show the container's
    masked files. The kernel refuses the mount."""

    def change(config: Config) -> None:
        config["process"]["user"] = {"uid": 1000, "gid": 1000}

    # mount_too_revealing() of the kernel: the container's own procfs is partly covered.
    script = "unshare -Ur true && ! unshare -Urmpf --mount-proc=/tmp true"
    runtime.shell(
        script, change=change, maskedPaths=["/proc/timer_list"], readonlyPaths=["/proc/sys"]
    )
