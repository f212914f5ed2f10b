"""kubelet on this machine: whether it talks to our server, and whether both drive cgroups in the
same way.

A kubelet that runs is asked by its command line in /proc; else the unit of systemd and its drop-ins
say how it would start.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from cri_server.doctor import cgroups
from cri_server.doctor.model import Finding, Host, Level, fine

UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")  # fmt: skip
DEFAULT_ENDPOINT = "unix:///run/containerd/containerd.sock"
ENDPOINT, DRIVER = "container-runtime-endpoint", "cgroup-driver"
NAMES = ("kubelet", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s")


def kubelet(host: Host) -> Iterator[Finding]:
    words, source = _command(host)
    if words is None:
        yield Finding(
            "kubelet", Level.NOTE, "there is no kubelet", "pods are those of `pyrunc-cri run`"
        )
        return
    flags = _flags(words)
    if _waits_for_kubeadm(host, flags):
        yield Finding(
            "kubelet",
            Level.NOTE,
            "kubelet waits for kubeadm: the machine is in no cluster",
            "it starts when the machine has joined one",
            f"kubeadm join … --cri-socket unix://{host.config.socket_path} (or kubeadm init)",
        )
        return
    settings, problem = _settings(host, flags.get("config", ""))
    if problem:
        yield Finding(
            "kubelet", Level.WARNING, problem, "kubelet does not start with it", "mend the file"
        )
    endpoint = flags.get(ENDPOINT) or str(
        settings.get("containerRuntimeEndpoint") or DEFAULT_ENDPOINT
    )
    yield _endpoint(host, endpoint, source, settings, flags)
    yield _driver(host, flags.get(DRIVER) or str(settings.get("cgroupDriver") or "cgroupfs"))


def _waits_for_kubeadm(host: Host, flags: dict[str, str]) -> bool:
    """kubeadm writes the configuration and either kubeconfig; its package's unit names all of them
    from the beginning."""
    written = [flags.get(name, "") for name in ("config", "bootstrap-kubeconfig", "kubeconfig")]
    return bool(flags.get("bootstrap-kubeconfig")) and not any(
        p and host.path(p).exists() for p in written
    )


def _endpoint(
    host: Host, endpoint: str, source: str, settings: dict[str, Any], flags: dict[str, str]
) -> Finding:
    ours = host.config.socket_path
    again = host.service("restart", "kubelet", "start kubelet again")
    if endpoint.removeprefix("unix://") == str(ours):
        return fine("kubelet", f"{source} talks to us at {endpoint}")
    if ENDPOINT not in flags and "containerRuntimeEndpoint" in settings:
        mend = f"containerRuntimeEndpoint: unix://{ours} in {flags.get('config')}, then {again}"
    else:
        mend = f"--{ENDPOINT}=unix://{ours} for kubelet (pyrunc-cri install-node writes the drop-in), then {again}"
    return Finding(
        "kubelet",
        Level.WRONG,
        f"{source} talks to {endpoint}",
        f"it starts no pod here: our socket is {ours}",
        mend,
    )


def _driver(host: Host, asked: str) -> Finding:
    ours = cgroups.used(host)
    if asked == ours:
        return fine("kubelet-cgroup-driver", f"{ours}, on both sides")
    return Finding(
        "kubelet-cgroup-driver",
        Level.WARNING,
        f"kubelet's cgroupDriver is {asked}, ours {ours}",
        "kubelet from 1.28 on asks us and takes ours; an older one, or one without KubeletCgroupDriverFromCRI, starts no pod",
        f"cgroupDriver: {ours} in kubelet's configuration",
    )


def _command(host: Host) -> tuple[list[str] | None, str]:
    """Its words and where they are from."""
    for folder in sorted(host.path("/proc").glob("[0-9]*")):
        try:
            name = (folder / "comm").read_text().strip()
            words = (
                (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
            )
        except OSError:
            continue
        if name in NAMES and words != [""]:
            return words, f"{name} (pid {folder.name})"
    return _unit(host), "kubelet.service"


def _unit(host: Host) -> list[str] | None:
    """The command of the unit, with variables that its files set."""
    files = [host.path(f"{f}/kubelet.service") for f in UNIT_FOLDERS]
    texts = [path.read_text(errors="replace") for path in files if path.is_file()][:1]
    drop_ins = {
        p.name: p
        for f in reversed(UNIT_FOLDERS)
        for p in host.path(f"{f}/kubelet.service.d").glob("*.conf")
    }
    texts += [drop_ins[name].read_text(errors="replace") for name in sorted(drop_ins)]
    command, variables = "", dict[str, str]()
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        key, _, value = line.partition("=")
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
        words = shlex.split(text, comments=True)
    except ValueError:
        return {}
    return {key: value for word in words for key, found, value in [word.partition("=")] if found}


def _flags(words: list[str]) -> dict[str, str]:
    """`--flag=value` and `--flag value`; the last one holds, as for kubelet."""
    found = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("-"):
            key, given, value = word.lstrip("-").partition("=")
            found[key] = value if given else after
    return found


def _settings(host: Host, path: str) -> tuple[dict[str, Any], str]:
    """The configuration file, and what is wrong with it."""
    if not path:
        return {}, ""
    import yaml  # which a server on a machine without kubelet can do without

    try:
        found = yaml.safe_load(host.path(path).read_text())
    except FileNotFoundError:
        return {}, f"kubelet's {path} is not there"
    except OSError as error:
        return {}, f"kubelet's {path}: {error.strerror}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, f"kubelet's {path} is not YAML: {' '.join(str(error).split())}"
    return (found, "") if isinstance(found, dict) else ({}, f"kubelet's {path} is no object")
