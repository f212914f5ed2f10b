"""The kernel: version, system calls, namespaces, seccomp, file systems and modules."""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Iterator

from cri_server.doctor.model import Finding, Host, Level, fine
from pyrunc.kernel.call import raw

OLDEST = (6, 1)
# Calls that a container's start makes (pyrunc.plan, pyrunc.launch), with arguments that each
# refuses before it does anything.
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
    """This machine's architecture in Debian's words."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def version(host: Host) -> Iterator[Finding]:
    release = host.text("/proc/sys/kernel/osrelease")
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        yield Finding(
            "kernel-version",
            Level.WRONG,
            f"Linux {release}",
            f"the server is made for {OLDEST[0]}.{OLDEST[1]} or later and tested with nothing older",
            f"install a newer kernel (Debian 12: apt install linux-image-{_debian_name()}) and reboot",
        )
    else:
        yield fine("kernel-version", f"Linux {release}")


def calls(host: Host) -> Iterator[Finding]:
    """Asks this kernel, whatever the host's files say."""
    missing = [name for name, arguments in CALLS.items() if raw(name, *arguments) == -errno.ENOSYS]
    if missing:
        yield Finding(
            "kernel-calls",
            Level.WRONG,
            f"the kernel or a filter around this process refuses {', '.join(missing)}",
            "no container can start",
            "run the server on the machine itself, or outside the container whose seccomp profile refuses them",
        )
    else:
        yield fine("kernel-calls", f"all of {len(CALLS)} newer system calls")


def namespaces(host: Host) -> Iterator[Finding]:
    there = [kind for kind in NAMESPACES if os.path.lexists(host.path(f"/proc/self/ns/{kind}"))]
    missing = sorted(set(NAMESPACES) - set(there) - {"user"})
    if missing:
        yield Finding(
            "namespaces", Level.WRONG, f"the kernel has no namespaces {', '.join(missing)}", "no pod can start",
            "boot a kernel with CONFIG_NAMESPACES and its kinds",
        )  # fmt: skip
    elif "user" not in there or host.number("/proc/sys/user/max_user_namespaces") == 0:
        yield Finding(
            "namespaces",
            Level.WARNING,
            "user namespaces are off",
            "pods with hostUsers: false are refused",
            "sysctl -w user.max_user_namespaces=15000",
        )
    else:
        yield fine("namespaces", ", ".join(NAMESPACES))


def seccomp(host: Host) -> Iterator[Finding]:
    there = set(host.text("/proc/sys/kernel/seccomp/actions_avail").split())
    if there >= SECCOMP_ACTIONS:
        yield fine("seccomp", "filters")
    else:
        yield Finding(
            "seccomp",
            Level.WRONG,
            "the kernel has no seccomp filters" if not there else f"the kernel lacks the actions {', '.join(sorted(SECCOMP_ACTIONS - there))}",
            "pods with the profile RuntimeDefault, which is each sandbox, cannot start",
            "boot a kernel with CONFIG_SECCOMP_FILTER",
        )  # fmt: skip


def modules(host: Host) -> Iterator[Finding]:
    if re.search(r"^nodev\toverlay$", host.text("/proc/filesystems"), re.MULTILINE):
        yield fine("module-overlay", "overlay")
    else:
        yield Finding(
            "module-overlay",
            Level.WRONG,
            "the file system overlay is not there",
            "containers have no root: none can be created",
            "modprobe overlay && echo overlay > /etc/modules-load.d/pyrunc.conf",
        )
    yield _bridge_filter(host)


def _bridge_filter(host: Host) -> Finding:
    value = host.number("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if value == 1:
        return fine("module-br-netfilter", "packets over bridges pass the firewall")
    if value == 0:
        found = "net.bridge.bridge-nf-call-iptables is 0"
        mend = "sysctl -w net.bridge.bridge-nf-call-iptables=1"
    else:
        found = "the module br_netfilter is not loaded"
        mend = "modprobe br_netfilter && echo br_netfilter > /etc/modules-load.d/br_netfilter.conf"
    follows = "a pod does not reach a Service whose pod is on the same node and bridge (kube-proxy does not see the answer)"
    return Finding("module-br-netfilter", Level.WARNING, found, follows, mend)
