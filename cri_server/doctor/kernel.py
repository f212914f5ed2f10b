"""Checks of the kernel: version, system calls, namespaces, seccomp, file systems and modules."""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Iterator

from cri_server.doctor.model import CheckResult, Machine, fine, warning, wrong
from pyrunc.kernel.call import raw

# This is the kernel of Debian 12.
OLDEST = (6, 1)
# Calls of a container's start (pyrunc.plan, pyrunc.launch), with invalid arguments, so that the
# kernel refuses them without an effect.
CALLS = {
    "clone3": (0, 0),
    "openat2": (-1, 0, 0, 0),
    "open_tree": (-1, 0, 1 << 30),
    "fsopen": (0, 1 << 30),
    "move_mount": (-1, 0, -1, 0, 1 << 30),
    "mount_setattr": (-1, 0, 0, 0, 1),
    "close_range": (1, 0, 0),
    "pidfd_open": (-1, 0),
    "pidfd_getfd": (-1, -1, 1),
    "pidfd_send_signal": (-1, 0, 0, 1),
}
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
SECCOMP_ACTIONS = {"errno", "kill_process", "allow", "log", "trap", "trace"}


def _debian_name() -> str:
    """Return this machine's architecture as Debian names it."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def version(host: Machine) -> Iterator[CheckResult]:
    """Check that the kernel is not older than OLDEST, the oldest version that the server
    supports."""
    release = host.text("/proc/sys/kernel/osrelease")
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        yield wrong(
            "kernel-version",
            f"Linux {release}",
            f"the server supports and is tested with Linux {OLDEST[0]}.{OLDEST[1]} or later",
            f"install a newer kernel (on Debian: apt install linux-image-{_debian_name()}) and"
            " reboot",
        )
    else:
        yield fine("kernel-version", f"Linux {release}")


def calls(host: Machine) -> Iterator[CheckResult]:
    """Check that the running kernel has the system calls in CALLS, by trying each."""
    missing = [name for name, arguments in CALLS.items() if raw(name, *arguments) == -errno.ENOSYS]
    if missing:
        yield wrong(
            "kernel-calls",
            f"the kernel or a filter around this process refuses {', '.join(missing)}",
            "no container can start",
            "run the server outside of the container or VM whose seccomp filter refuses them, or"
            " boot a newer kernel",
        )
    else:
        yield fine("kernel-calls", f"all {len(CALLS)} newer system calls exist")


def namespaces(host: Machine) -> Iterator[CheckResult]:
    """Check that the kernel has all kinds of namespaces, and permits user namespaces."""
    available = [kind for kind in NAMESPACES if os.path.lexists(host.path(f"/proc/self/ns/{kind}"))]
    missing = sorted(set(NAMESPACES) - set(available) - {"user"})
    if missing:
        yield wrong(
            "namespaces",
            f"the kernel lacks the namespaces {', '.join(missing)}",
            "no pod can start",
            "boot a kernel with CONFIG_NAMESPACES and all kinds of namespaces",
        )
    # This limit holds for root as well (namespaces(7)).
    elif "user" not in available or host.number("/proc/sys/user/max_user_namespaces") == 0:
        yield warning(
            "namespaces",
            "user namespaces are disabled",
            "pods with hostUsers: false are refused",
            "sysctl -w user.max_user_namespaces=15000",
        )
    else:
        yield fine("namespaces", ", ".join(NAMESPACES))


def seccomp(host: Machine) -> Iterator[CheckResult]:
    """Check that the kernel has the seccomp actions of the default profile."""
    available = set(host.text("/proc/sys/kernel/seccomp/actions_avail").split())
    if available >= SECCOMP_ACTIONS:
        yield fine("seccomp", "filters")
    else:
        yield wrong(
            "seccomp",
            f"the kernel lacks the seccomp actions {', '.join(sorted(SECCOMP_ACTIONS - available))}"
            if available
            else "the kernel has no seccomp filters",
            "no pod can start, because each sandbox has the profile RuntimeDefault",
            "boot a kernel with CONFIG_SECCOMP_FILTER",
        )


def modules(host: Machine) -> Iterator[CheckResult]:
    """Check that the file system overlay is available, and that br_netfilter is loaded and passes
    bridged packets to the firewall."""
    if re.search(r"^nodev\toverlay$", host.text("/proc/filesystems"), re.MULTILINE):
        yield fine("module-overlay", "overlay")
    else:
        yield wrong(
            "module-overlay",
            "the kernel has no file system overlay",
            "no container can be created, because its root is an overlay",
            "modprobe overlay && echo overlay > /etc/modules-load.d/pyrunc.conf",
        )
    yield _bridge_filter(host)


def _bridge_filter(host: Machine) -> CheckResult:
    value = host.number("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if value == 1:
        return fine("module-br-netfilter", "packets over bridges pass the firewall")
    if value == 0:
        text = "net.bridge.bridge-nf-call-iptables is 0"
        remedy = "sysctl -w net.bridge.bridge-nf-call-iptables=1"
    else:
        text = "the module br_netfilter is not loaded"
        remedy = (
            "modprobe br_netfilter && echo br_netfilter > /etc/modules-load.d/br_netfilter.conf"
        )
    effect = (
        "a pod cannot reach a Service whose pod is on the same bridge, because kube-proxy does not"
        " see the replies"
    )
    return warning("module-br-netfilter", text, effect, remedy)
