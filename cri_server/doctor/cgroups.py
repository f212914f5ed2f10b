"""Checks of control groups: the v2 tree, its controllers, and the cgroup driver."""

from __future__ import annotations

from collections.abc import Iterator

from cri_server.doctor.model import CheckResult, Level, Machine, fine, warning, wrong

TREES = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
NEEDED, USEFUL = ("cpu", "memory", "pids"), ("cpuset", "io", "hugetlb")
UNIFIED = (
    "add systemd.unified_cgroup_hierarchy=1 to the kernel's command line (GRUB_CMDLINE_LINUX in"
    " /etc/default/grub, update-grub) and reboot"
)


def tree(host: Machine) -> str:
    """Return the mount point of cgroup v2; an empty string if it is not mounted."""
    return next((path for path in TREES if host.path(f"{path}/cgroup.controllers").exists()), "")


def version(host: Machine) -> Iterator[CheckResult]:
    """Check that cgroup v2 is mounted and has the controllers that limits need."""
    root = tree(host)
    if not root:
        yield wrong("cgroup-v2", "no cgroup v2 tree", "the server does not start", UNIFIED)
        return
    if root != TREES[0]:
        strict = host.config.cgroup.missing_controllers == "error"
        yield warning(
            "cgroup-v2",
            f"this is a hybrid host: besides the v2 tree at {root} it has v1 hierarchies",
            f"limits of v1 controllers are {'refused' if strict else 'not enforced'}",
            UNIFIED,
        )
    else:
        yield fine("cgroup-v2", f"unified, at {root}")
    yield from _controllers(host, root)


def _controllers(host: Machine, root: str) -> Iterator[CheckResult]:
    available = set(host.text(f"{root}/cgroup.controllers").split())
    missing = [name for name in NEEDED if name not in available]
    if missing:
        strict = host.config.cgroup.missing_controllers == "error"
        off = "cgroup_disable=memory" in host.text("/proc/cmdline")
        yield CheckResult(
            "cgroup-controllers",
            Level.WRONG if strict else Level.WARNING,
            f"the v2 tree lacks {', '.join(missing)}",
            "containers with limits of these controllers are"
            f" {'refused' if strict else 'not limited'}, and kubelet gets no statistics of them",
            "add cgroup_enable=memory to the kernel's command line and reboot" if off else UNIFIED,
        )
    else:
        lacking = [name for name in USEFUL if name not in available]
        text = " ".join(sorted(available & {*NEEDED, *USEFUL}))
        level = Level.NOTE if lacking else Level.FINE
        effect = f"limits of {', '.join(lacking)} cannot be set" if lacking else ""
        yield CheckResult("cgroup-controllers", level, text, effect)


def driver(host: Machine) -> Iterator[CheckResult]:
    """Check that [cgroup] driver fits this machine: with the driver `systemd`, systemd must run;
    with `cgroupfs`, it should not."""
    setting, systemd = host.config.cgroup.driver, host.has_systemd
    if setting == "systemd" and not systemd:
        yield wrong(
            "cgroup-driver",
            "cgroup.driver is systemd, but systemd does not run",
            "the server does not start",
            'set [cgroup] driver = "auto"',
        )
    elif setting == "cgroupfs" and systemd:
        yield warning(
            "cgroup-driver",
            "cgroup.driver is cgroupfs, but systemd manages the cgroups of this host",
            "systemd may remove controllers and limits from pods",
            'set [cgroup] driver = "auto", and cgroupDriver: systemd for kubelet',
        )
    else:
        yield fine("cgroup-driver", driver_in_use(host))


def driver_in_use(host: Machine) -> str:
    """Return the cgroup driver that the server uses."""
    if host.config.cgroup.driver != "auto":
        return host.config.cgroup.driver
    return "systemd" if host.has_systemd else "cgroupfs"
