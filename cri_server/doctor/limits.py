"""Checks of security modules, of the machine's limits, of swap, and of the executables of runtime
handlers."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from cri_server.doctor.model import CheckResult, Machine, fine, note, warning
from cri_server.security.selinux import policy

DESCRIPTORS = 65_536  # for some hundred pods
# sysctl -> the minimum for a node with 110 pods, the effect of a lower value
SYSCTLS = {
    # The kernel's default is 128 per user (fs/notify/inotify/inotify_user.c), and the host's root
    # and the root of all containers without a user namespace are one user.
    "fs.inotify.max_user_instances": (
        512,
        'programs that watch files, such as kubelet, fail with "too many open files"',
    ),
    "fs.inotify.max_user_watches": (
        65_536,
        'programs that watch files fail with "no space left on device"',
    ),
    "fs.file-max": (500_000, "no process of this machine can open files"),
    "kernel.pid_max": (32_768, "no process of this machine can fork"),
    "kernel.keys.root_maxkeys": (
        10_000,
        "containers cannot start when root has no keys left for their session keyrings",
    ),
}


def privilege(host: Machine) -> Iterator[CheckResult]:
    """Yield a note if doctor does not run as root, because it then skips some checks."""
    if os.geteuid():
        yield note(
            "root",
            f"doctor runs as user {os.geteuid()}",
            "checks that need root were skipped",
            "sudo pyrunc-cri doctor",
        )


def apparmor(host: Machine) -> Iterator[CheckResult]:
    """Check that AppArmor, if it is on, can load profiles."""
    if host.text("/sys/module/apparmor/parameters/enabled") != "Y":
        yield note(
            "apparmor",
            "the kernel does not use AppArmor",
            "containers with their own AppArmor profile are refused",
        )
    elif host.program("apparmor_parser"):
        yield fine("apparmor", "on, with its parser")
    else:
        yield warning(
            "apparmor",
            "AppArmor is on, but apparmor_parser is missing",
            "the default profile cannot be loaded: containers run unconfined or are refused",
            "apt install apparmor",
        )


def selinux(host: Machine) -> Iterator[CheckResult]:
    """If SELinux is on, check that its policy knows the labels of containers."""
    kernel = host.path(policy.KERNEL)
    labels = policy.probe(host.top)
    if labels is None:
        yield fine("selinux", "off")
        return
    mode = "enforcing" if host.text(f"{policy.KERNEL}/enforce") == "1" else "permissive"
    unknown = [str(c) for c in (labels.process, labels.file) if not policy.is_known(c, kernel)]
    if not host.config.selinux.enabled:
        yield note(
            "selinux",
            f"{mode}, and [selinux] enabled = false",
            "pods get no labels, also if they request them",
        )
    elif unknown:
        yield warning(
            "selinux",
            f"{mode}; the policy lacks {' and '.join(unknown)}",
            "containers cannot start: the kernel refuses their labels",
            "install a policy for containers (package container-selinux), or set [selinux] enabled"
            " = false",
        )
    else:
        yield fine("selinux", f"{mode}, containers have the label {labels.process}")


def descriptors(host: Machine) -> Iterator[CheckResult]:
    """Check that the hard limit of open descriptors is at least DESCRIPTORS."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        yield warning(
            "descriptors",
            f"the limit of descriptors is {hard}",
            "a server with this limit fails with some hundred pods",
            "LimitNOFILE=1048576 in the unit, or ulimit -Hn 1048576 before the start",
        )
    else:
        yield fine("descriptors", str(hard) if hard != resource.RLIM_INFINITY else "unlimited")


def sysctls(host: Machine) -> Iterator[CheckResult]:
    """Check that each sysctl in SYSCTLS has at least the value given there."""
    low = []
    for name, (least, effect) in SYSCTLS.items():
        value = host.number("/proc/sys/" + name.replace(".", "/"))
        if value is not None and value < least:
            remedy = f"sysctl -w {name}={least}"
            low.append(warning("sysctls", f"{name} is {value}", effect, remedy))
    yield from low or [fine("sysctls", f"{len(SYSCTLS)} limits are high enough")]


def swap(host: Machine) -> Iterator[CheckResult]:
    """Report enabled swap: with it, kubelet starts only if failSwapOn is false."""
    lines = host.text("/proc/swaps").splitlines()[1:]
    if lines:
        names = ", ".join(line.split()[0] for line in lines)
        yield note(
            "swap",
            f"swap is on: {names}",
            "kubelet does not start unless its failSwapOn is false",
            "swapoff -a, and remove it from /etc/fstab",
        )
    else:
        yield fine("swap", "off")


def runtimes(host: Machine) -> Iterator[CheckResult]:
    """Check that the `binary` of each runtime handler is an executable file."""
    missing = {
        name: runtime.binary
        for name, runtime in host.config.runtimes.items()
        if runtime.binary and not os.access(host.path(runtime.binary), os.X_OK)
    }
    for name, binary in missing.items():
        yield warning(
            "runtimes",
            f"[runtimes.{name}] binary {binary} is not an executable file",
            f"containers of RuntimeClasses with the handler {name} cannot be started",
            f"install the program, or correct [runtimes.{name}] binary",
        )
    if host.config.runtimes and not missing:
        yield fine("runtimes", ", ".join(sorted(host.config.runtimes)))
