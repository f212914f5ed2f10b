"""Checks kubelet on this machine: whether it uses this server, and whether both have the same
cgroup driver.

kubelet's command line is that of the running process (/proc), or else that of the systemd unit with
its drop-ins.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from cri_server.doctor import cgroups
from cri_server.doctor.model import CheckResult, Machine, fine, note, warning, wrong
from cri_server.systemd.units import service_settings, unit_files

# This is kubelet's default. Its default for cgroupDriver (below) is cgroupfs.
DEFAULT_ENDPOINT = "unix:///run/containerd/containerd.sock"
ENDPOINT, DRIVER = "container-runtime-endpoint", "cgroup-driver"
# k3s, rke2 and k0s run kubelet within their own process
NAMES = ("kubelet", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s")


def kubelet(host: Machine) -> Iterator[CheckResult]:
    """Check that kubelet uses this server and has the same cgroup driver as the server."""
    arguments, source = _command(host)
    if arguments is None:
        yield note("kubelet", "no kubelet is installed", "only `pyrunc-cri run` makes pods")
        return
    flags = _flags(arguments)
    if _waits_for_kubeadm(host, flags):
        yield note(
            "kubelet",
            "kubelet waits for kubeadm, because this machine has not joined a cluster",
            "kubelet starts after kubeadm join or init",
            f"kubeadm join … --cri-socket unix://{host.config.socket_path} (or kubeadm init)",
        )
        return
    settings, problem = _settings(host, flags.get("config", ""))
    if problem:
        yield warning("kubelet", problem, "kubelet does not start", "correct the file")
    endpoint = flags.get(ENDPOINT) or str(
        settings.get("containerRuntimeEndpoint") or DEFAULT_ENDPOINT
    )
    yield _endpoint(host, endpoint, source, settings, flags)
    yield _driver(host, flags.get(DRIVER) or str(settings.get("cgroupDriver") or "cgroupfs"))


def _waits_for_kubeadm(host: Machine, flags: dict[str, str]) -> bool:
    """Return whether kubelet waits for kubeadm to configure it. It does if its command line
    (`flags`) has --bootstrap-kubeconfig, and no file given with --config, --bootstrap-kubeconfig or
    --kubeconfig exists yet."""
    written = [flags.get(name, "") for name in ("config", "bootstrap-kubeconfig", "kubeconfig")]
    return bool(flags.get("bootstrap-kubeconfig")) and not any(
        p and host.path(p).exists() for p in written
    )


def _endpoint(
    host: Machine, endpoint: str, source: str, settings: dict[str, Any], flags: dict[str, str]
) -> CheckResult:
    ours = host.config.socket_path
    again = host.service("restart", "kubelet", "start kubelet again")
    if endpoint.removeprefix("unix://") == str(ours):
        return fine("kubelet", f"{source} uses this server at {endpoint}")
    if ENDPOINT not in flags and "containerRuntimeEndpoint" in settings:
        remedy = f"containerRuntimeEndpoint: unix://{ours} in {flags.get('config')}, then {again}"
    else:
        remedy = (
            f"--{ENDPOINT}=unix://{ours} for kubelet (pyrunc-cri install-node writes a drop-in"
            f" with it), then {again}"
        )
    return wrong(
        "kubelet",
        f"{source} uses the runtime at {endpoint}",
        f"kubelet starts no pods with this server, whose socket is {ours}",
        remedy,
    )


def _driver(host: Machine, driver: str) -> CheckResult:
    ours = cgroups.driver_in_use(host)
    if driver == ours:
        return fine("kubelet-cgroup-driver", f"{ours} for kubelet and server")
    return warning(
        "kubelet-cgroup-driver",
        f"kubelet's cgroupDriver is {driver}, the server's is {ours}",
        "kubelet 1.28 or later uses the server's driver; an older kubelet, or one without the gate"
        " KubeletCgroupDriverFromCRI, starts no pod",
        f"cgroupDriver: {ours} in kubelet's configuration",
    )


def _command(host: Machine) -> tuple[list[str] | None, str]:
    """Return kubelet's arguments, and their source: the running process, or else the systemd unit.
    The arguments are None if there is neither."""
    for folder in sorted(host.path("/proc").glob("[0-9]*")):
        try:
            name = host.text(f"/proc/{folder.name}/comm")
            arguments = (
                (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
            )
        except OSError:
            continue
        if name in NAMES and arguments != [""]:
            return arguments, f"{name} (pid {folder.name})"
    return _unit(host), "kubelet.service"


def _unit(host: Machine) -> list[str] | None:
    """Return kubelet's command line from its systemd unit, with the variables of Environment= and
    EnvironmentFile= expanded; None if there is no unit."""
    # A later ExecStart= replaces an earlier one, because drop-ins reset it with an empty one first.
    command, variables = "", dict[str, str]()
    for file in unit_files(host.top, "kubelet.service"):
        for key, value in service_settings(file):
            if key == "ExecStart":
                command = value
            elif key == "Environment":
                variables |= _assignments(value)
            elif key == "EnvironmentFile":
                variables |= _assignments(" ".join(host.text(value.lstrip("-")).splitlines()))
    expanded = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], ""), command)
    try:
        return shlex.split(expanded) or None
    except ValueError:
        return expanded.split() or None


def _assignments(text: str) -> dict[str, str]:
    try:
        assignments = shlex.split(text, comments=True)
    except ValueError:
        return {}
    return {
        key: value
        for assignment in assignments
        for key, equals, value in [assignment.partition("=")]
        if equals
    }


def _flags(arguments: list[str]) -> dict[str, str]:
    """Parse `--flag=value` and `--flag value` into {flag: value}. For a repeated flag the last
    value counts, as in kubelet."""
    flags = {}
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.startswith("-"):
            key, equals, value = argument.lstrip("-").partition("=")
            flags[key] = value if equals else after
    return flags


def _settings(host: Machine, path: str) -> tuple[dict[str, Any], str]:
    """Read kubelet's configuration file. Return its settings and "", or {} and the reason why the
    file cannot be used. For an empty `path` return {} and ""."""
    if not path:
        return {}, ""
    import yaml  # imported only where there is a kubelet

    try:
        settings = yaml.safe_load(host.path(path).read_text())
    except FileNotFoundError:
        return {}, f"kubelet's file {path} is missing"
    except OSError as error:
        return {}, f"kubelet's file {path}: {error.strerror}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, f"kubelet's file {path} is not YAML: {' '.join(str(error).split())}"
    return (
        (settings, "") if isinstance(settings, dict) else ({}, f"kubelet's {path} is not an object")
    )
