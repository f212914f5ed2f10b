"""Control groups: the v2 tree, its controllers, and who drives them."""

from __future__ import annotations

from collections.abc import Iterator

from cri_server.doctor.model import Finding, Host, Level, fine

TREES = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
NEEDED, USEFUL = ("cpu", "memory", "pids"), ("cpuset", "io", "hugetlb")
UNIFIED = "put systemd.unified_cgroup_hierarchy=1 on the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub) and reboot"  # fmt: skip


def tree(host: Host) -> str:
    """Where the v2 tree is mounted; empty when there is none."""
    return next((path for path in TREES if host.path(f"{path}/cgroup.controllers").exists()), "")


def version(host: Host) -> Iterator[Finding]:
    root = tree(host)
    if not root:
        yield Finding(
            "cgroup-v2", Level.WRONG, "no cgroup v2 tree", "the server does not start", UNIFIED
        )
        return
    if root != TREES[0]:
        strict = host.config.cgroup.missing_controllers == "error"
        yield Finding(
            "cgroup-v2",
            Level.WARNING,
            f"a hybrid host: the v2 tree at {root} is beside hierarchies of v1",
            "limits whose controller is on v1 are refused" if strict else "limits whose controller is on v1 do not hold",
            UNIFIED,
        )  # fmt: skip
    else:
        yield fine("cgroup-v2", f"unified, at {root}")
    yield from _controllers(host, root)


def _controllers(host: Host, root: str) -> Iterator[Finding]:
    there = set(host.text(f"{root}/cgroup.controllers").split())
    missing = [name for name in NEEDED if name not in there]
    if missing:
        strict = host.config.cgroup.missing_controllers == "error"
        off = "cgroup_disable=memory" in host.text("/proc/cmdline")
        yield Finding(
            "cgroup-controllers",
            Level.WRONG if strict else Level.WARNING,
            f"the v2 tree lacks {', '.join(missing)}",
            f"containers with such a limit are {'refused' if strict else 'not limited'}, and kubelet's statistics lack it",
            "put cgroup_enable=memory on the kernel's command line and reboot" if off else UNIFIED,
        )
    else:
        lacking = [name for name in USEFUL if name not in there]
        found = " ".join(sorted(there & {*NEEDED, *USEFUL}))
        level = Level.NOTE if lacking else Level.FINE
        follows = f"limits by {', '.join(lacking)} cannot be set" if lacking else ""
        yield Finding("cgroup-controllers", level, found, follows)


def driver(host: Host) -> Iterator[Finding]:
    asked, systemd = host.config.cgroup.driver, host.path("/run/systemd/system").is_dir()
    if asked == "systemd" and not systemd:
        yield Finding(
            "cgroup-driver",
            Level.WRONG,
            "cgroup.driver is systemd, which does not run here",
            "the server does not start",
            'set [cgroup] driver = "auto"',
        )
    elif asked == "cgroupfs" and systemd:
        yield Finding(
            "cgroup-driver",
            Level.WARNING,
            "cgroup.driver is cgroupfs on a host whose groups systemd manages",
            "two write to one tree: systemd may take away controllers and limits of pods",
            'set [cgroup] driver = "auto", and cgroupDriver: systemd for kubelet',
        )
    else:
        yield fine("cgroup-driver", used(host))


def used(host: Host) -> str:
    """The driver that the server takes."""
    if host.config.cgroup.driver != "auto":
        return host.config.cgroup.driver
    return "systemd" if host.path("/run/systemd/system").is_dir() else "cgroupfs"
