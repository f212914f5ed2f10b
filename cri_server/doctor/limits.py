"""Security modules, limits of the machine, and swap."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from cri_server.doctor.model import Finding, Host, Level, fine
from cri_server.security.selinux import policy

DESCRIPTORS = 65_536
# sysctl -> the least that a node with 110 pods wants, what happens below it
SYSCTLS = {
    "fs.inotify.max_user_instances": (512, 'programs in pods that watch files fail with "too many open files", kubelet\'s log reader among them'),
    "fs.inotify.max_user_watches": (65_536, 'programs in pods that watch files fail with "no space left on device"'),
    "fs.file-max": (500_000, "opening files fails on the whole machine"),
    "kernel.pid_max": (32_768, "forks fail on the whole machine"),
    "kernel.keys.root_maxkeys": (10_000, "containers cannot start when the session keyrings of root's are used up"),
}  # fmt: skip


def privilege(host: Host) -> Iterator[Finding]:
    if os.geteuid():
        yield Finding(
            "root", Level.NOTE, f"looked at by user {os.geteuid()}", "what only root sees was not looked at", "sudo pyrunc-cri doctor",
        )  # fmt: skip


def apparmor(host: Host) -> Iterator[Finding]:
    if host.text("/sys/module/apparmor/parameters/enabled") != "Y":
        yield Finding(
            "apparmor", Level.NOTE, "the kernel does not use AppArmor", "containers that ask for a profile of their own are refused",
        )  # fmt: skip
    elif host.program("apparmor_parser"):
        yield fine("apparmor", "on, with its parser")
    else:
        yield Finding(
            "apparmor",
            Level.WARNING,
            "AppArmor is on, but there is no apparmor_parser",
            "the default profile cannot be loaded: containers that want it run unconfined or are refused",
            "apt install apparmor",
        )


def selinux(host: Host) -> Iterator[Finding]:
    kernel = host.path(policy.KERNEL)
    found = policy.probe(host.top)
    if found is None:
        yield fine("selinux", "off")
        return
    mode = "enforcing" if host.text(f"{policy.KERNEL}/enforce") == "1" else "permissive"
    unknown = [str(c) for c in (found.process, found.file) if not policy.is_known(c, kernel)]
    if not host.config.selinux.enabled:
        yield Finding(
            "selinux", Level.NOTE, f"{mode}, and [selinux] enabled = false", "pods get no labels, whatever they ask for"
        )  # fmt: skip
    elif unknown:
        yield Finding(
            "selinux",
            Level.WARNING,
            f"{mode}; the policy does not know {' and '.join(unknown)}",
            "containers cannot start: the kernel refuses their labels",
            "a policy for containers (package container-selinux), or [selinux] enabled = false",
        )
    else:
        yield fine("selinux", f"{mode}, containers are {found.process}")


def descriptors(host: Host) -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        yield Finding(
            "descriptors",
            Level.WARNING,
            f"this process may have {hard} descriptors",
            "a server that is started like this fails with some hundred pods",
            "LimitNOFILE=1048576 in the unit, or ulimit -Hn 1048576 before",
        )
    else:
        yield fine("descriptors", str(hard) if hard != resource.RLIM_INFINITY else "unlimited")


def sysctls(host: Host) -> Iterator[Finding]:
    low = []
    for name, (least, follows) in SYSCTLS.items():
        value = host.number("/proc/sys/" + name.replace(".", "/"))
        if value is not None and value < least:
            low.append(Finding("sysctls", Level.WARNING, f"{name} is {value}", follows, f"sysctl -w {name}={least}"))  # fmt: skip
    yield from low or [fine("sysctls", f"{len(SYSCTLS)} of them are high enough")]


def swap(host: Host) -> Iterator[Finding]:
    lines = host.text("/proc/swaps").splitlines()[1:]
    if lines:
        names = ", ".join(line.split()[0] for line in lines)
        yield Finding(
            "swap",
            Level.NOTE,
            f"swap is on: {names}",
            "kubelet does not start unless its failSwapOn is false",
            "swapoff -a, and take it out of /etc/fstab",
        )
    else:
        yield fine("swap", "off")


def runtimes(host: Host) -> Iterator[Finding]:
    """The programs of runtime handlers."""
    missing = {
        name: runtime.binary
        for name, runtime in host.config.runtimes.items()
        if runtime.binary and not os.access(host.path(runtime.binary), os.X_OK)
    }
    for name, binary in missing.items():
        yield Finding(
            "runtimes",
            Level.WARNING,
            f"[runtimes.{name}] binary {binary} is not an executable file",
            f"containers of RuntimeClasses with the handler {name} cannot be started",
            f"install it, or change [runtimes.{name}]",
        )
    if host.config.runtimes and not missing:
        yield fine("runtimes", ", ".join(sorted(host.config.runtimes)))
