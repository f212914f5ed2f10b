"""Attacks on the CRI server by hostile images, strings in requests and neighbours on the node.

Covered: CVE-2020-15257 (sockets), CVE-2021-41103 and CVE-2024-25621 (modes), CVE-2024-40635,
CVE-2026-46680, CVE-2026-47262 and CVE-2025-4437 (users), CVE-2022-0811 (sysctls), CVE-2022-1708 and
CVE-2022-31030 (output), CVE-2022-4318 (HOME), CVE-2024-3154 (annotations), CVE-2024-5154 and
CVE-2025-0750 (paths of logs and of /etc), CVE-2022-23648 (volumes), CVE-2024-21626 (WORKDIR),
CVE-2026-53488 (labels).

tests/cri/images/test_hostile.py attacks the unpacking of layers,
tests/cri/streaming/test_hostile.py the streaming server, tests/unit/cni and tests/cri/network have
hostile plugins.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from cri_server.spec import sources
from tests.cri.server_harness import Server, code_of, message_of
from tests.cri.test_recovery import shim_pid
from tests.security.attack import Canary
from tests.support.processes import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CLIMB = "../../../../../../../../../../.."
ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\n"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def pod(server: Server, host_pod: str) -> str:
    return host_pod


@pytest.fixture(autouse=True)
def containers_are_removed(server: Server) -> Iterator[None]:
    yield
    for container in server.containers():
        server.remove_container(container.id)


def image(server: Server, files: dict[str, Any] | None = None, **config: Any) -> api.ImageSpec:
    """Load a busybox image with these additional files and configuration fields; return its
    reference."""
    name = f"registry.test/hostile:{next(_numbers)}"
    layers = [*build.busybox().layers, *([build.layer(files)] if files else [])]
    server.load_image(
        build.docker_archive(
            {name: build.image(layers, {"Env": ["PATH=/bin"], "Cmd": ["sh"], **config})}
        )
    )
    return api.ImageSpec(image=name)


def container_config(server: Server, *command: str, **changes: Any) -> api.ContainerConfig:
    """Return the configuration of a container with its own name and log."""
    number = next(_numbers)
    changes.setdefault("log_path", f"c{number}.log")
    config = server.container_config(command or ("sleep", "3600"), **changes)
    config.metadata.name = f"c{number}"
    return config


def outcome(server: Server, pod: str, *command: str, **changes: Any) -> tuple[int, list[str]]:
    """Return the exit code and log of a container, or -1 and the error if it cannot be created or
    started."""
    try:
        container = server.launch(pod, container_config(server, *command, **changes))
    except grpc.RpcError as error:
        return -1, [f"{error.code().name}: {error.details()}"]  # type: ignore[attr-defined]
    exit_code = server.wait_exit(container).exit_code
    return exit_code, server.log_lines(container)


def context(**fields: Any) -> api.LinuxContainerConfig:
    return api.LinuxContainerConfig(security_context=api.LinuxContainerSecurityContext(**fields))


# ---- the node


def test_the_server_has_no_abstract_sockets(server: Server, pod: str) -> None:
    """CVE-2020-15257: a container with host networking sees the abstract sockets of all programs of
    the host. The server has none, and the container cannot reach the server's other sockets by a
    path."""
    code, lines = outcome(server, pod, "cat", "/proc/net/unix")
    assert code == 0 and len(lines) > 2, "the server's own sockets must be in the list"
    assert not [line for line in lines if "@" in line]
    assert outcome(server, pod, "ls", str(server.socket))[0] != 0


def test_other_users_cannot_reach_sockets_and_folders(server: Server, pod: str) -> None:
    """CVE-2020-15257, CVE-2021-41103, CVE-2024-25621: the server starts under umask 0 with folders
    of mode 0777. For uid 65534 every connect and every listing fails, and no folder has a mode
    above 0711."""
    container = server.launch(pod, container_config(server))
    folders = [server.root, server.state, *(p for p in server.state.rglob("*") if p.is_dir()),
               *(p for p in server.root.glob("*/") if p.is_dir()),
               *(server.root / "containers").glob("*")]  # fmt: skip
    assert not [
        f"{p} {p.stat().st_mode:o}"
        for p in folders
        if p.stat().st_mode & 0o077 and p != server.state
    ]
    assert server.state.stat().st_mode & 0o777 == 0o711
    sockets = [server.socket, *server.state.rglob("*.sock")]
    assert len(sockets) >= 2
    script = (
        "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\nfor path in"
        " sys.argv[1:]:\n kind = socket.SOCK_STREAM if path.endswith('cri.sock') else"
        " socket.SOCK_SEQPACKET\n try:\n  os.chdir(os.path.dirname(path))\n "
        " socket.socket(socket.AF_UNIX, kind).connect(os.path.basename(path))\n  print(path)\n"
        " except PermissionError: pass\n"
    )
    server.folder.chmod(0o755)
    try:
        result = subprocess.run(
            ["python3", "-c", script, *map(str, sockets)],
            capture_output=True,
            text=True,
            check=True,
        )
        listing = subprocess.run(
            [
                "setpriv",
                "--reuid",
                "65534",
                "--clear-groups",
                "ls",
                server.root,
                server.root / "containers" / container,
            ],
            capture_output=True,
            check=False,
        )
    finally:
        server.folder.chmod(0o700)
    assert result.stdout == "" and listing.returncode != 0 and listing.stdout == b""


def test_the_log_has_no_secrets_and_no_control_characters(server: Server, pod: str) -> None:
    """The server's log has neither values of environment variables nor escape sequences from
    names."""
    evil = "\x1b[2Jevil\x07"
    secret = f"secret-{os.urandom(8).hex()}"
    config = container_config(
        server,
        *["true"],
        envs=[api.KeyValue(key="PASSWORD", value=secret.encode())],
        annotations={evil: evil},
        labels={"a": evil},
    )
    config.metadata.name = f"c{evil}"
    try:
        server.wait_exit(server.launch(pod, config))
    except grpc.RpcError as error:
        assert error.code() == INVALID  # type: ignore[attr-defined]
    code_of(
        lambda: server.create(
            pod, container_config(server, *["true"], image=api.ImageSpec(image=f"{evil}:1"))
        )
    )
    code_of(lambda: server.status(evil))
    text = server.log.read_text()
    assert secret not in text
    assert not [line for line in text.splitlines() if any(ord(c) < 32 and c != "\t" for c in line)]


# ---- users, groups and capabilities


NUMBERS = ["1000", "4294967296", "2147483648", "99999999999999999999", "9" * 60, "01000"]


@pytest.mark.requirement("8.3")
def test_a_numeric_user_is_never_taken_for_a_name(server: Server, pod: str) -> None:
    """CVE-2024-40635, CVE-2026-46680: the image's /etc/passwd has accounts whose names are numbers
    and whose uid is 0. If the image's USER or the caller demands such a number, the process has it
    as its uid, or CreateContainer fails."""
    # kubelet's runAsNonRoot would not notice uid 0.
    passwd = ACCOUNTS + "".join(f"{n}:x:0:0::/root:/bin/sh\n" for n in NUMBERS)
    group = "root:x:0:\n" + "".join(f"{n}:x:0:\n" for n in NUMBERS)
    show = ("grep", "-E", "^(Uid|Gid):", "/proc/self/status")
    files = {"etc/passwd": passwd, "etc/group": group}
    for number in NUMBERS:
        spec = image(server, files, User=number)
        code, lines = outcome(server, pod, *show, image=spec)
        assert (code == -1 and "INVALID" in lines[0]) or re.match(
            rf"Uid:\t{int(number)}\t", lines[0]
        ), (
            number,
            lines,
        )
    spec = image(server, files, User="1:1000")
    assert outcome(server, pod, *show, image=spec)[1][1].startswith("Gid:\t1000\t")
    for fields in ({"run_as_user": api.Int64Value(value=1000)}, {"run_as_username": "1000"}):
        code, lines = outcome(server, pod, *show, image=spec, linux=context(**fields))
        assert code == 0 and lines[0].startswith("Uid:\t1000\t"), (fields, lines)


def test_hostile_account_files_do_no_harm(server: Server, pod: str, canary: Canary) -> None:
    """CVE-2026-47262, CVE-2025-4437: /etc/passwd is a pipe, a device, a link to the host or to
    /proc/self/fd, or has a million lines. CreateContainer fails in time and with less than 64 MiB
    of memory, and the host's canary is untouched."""
    before = resident(server)
    hostile = {
        "pipe": build.LayerFile(kind=tarfile.FIFOTYPE),
        "device": build.LayerFile(kind=tarfile.CHRTYPE, device=(1, 5), mode=0o666),
        "host": build.symlink(f"{CLIMB}{canary.path}/passwd"),
        "absolute": build.symlink(str(canary.path / "passwd")),
        "magic": build.symlink("/proc/self/fd/0"), "loop": build.symlink("passwd"),
        "huge": b"a:a:0:0\n" * 1_000_000,
    }  # fmt: skip
    for name, node in hostile.items():
        spec = image(server, {"etc/passwd": node, "etc/group": node}, User="canary")
        begin = time.monotonic()
        code, lines = outcome(server, pod, "true", image=spec)
        assert code == -1 and "INVALID_ARGUMENT" in lines[0], (name, lines)
        assert time.monotonic() - begin < 40
    assert resident(server) - before < 64 << 20


def resident(server: Server) -> int:
    return (
        int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[0]) * 1024
    )


def test_home_with_a_newline_adds_no_account(server: Server, pod: str) -> None:
    """CVE-2022-4318: HOME, set by the caller or by the image, has a line of /etc/passwd. The
    container's /etc/passwd stays that of the image."""
    evil = "/x\nroot2::0:0::/:/bin/sh"
    spec = image(server, {"etc/passwd": ACCOUNTS}, Env=["PATH=/bin", f"HOME={evil}"])
    for envs in ([], [api.KeyValue(key="HOME", value=evil.encode())]):
        code, lines = outcome(server, pod, "cat", "/etc/passwd", image=spec, envs=envs)
        assert code == -1 or "\n".join(lines) + "\n" == ACCOUNTS, lines


@pytest.mark.requirement("8.2")
def test_capabilities_and_groups_are_the_requested_ones(server: Server, pod: str) -> None:
    """CVE-2022-27652, CVE-2022-2995, CVE-2023-25173: a container and ExecSync have no inheritable
    capability, also with added capabilities and as an ordinary user. Their groups are the requested
    ones and not the server's."""
    show = "grep -E '^(CapInh|CapAmb|Groups)' /proc/self/status"
    for fields in (
        {},
        {"capabilities": api.Capability(add_capabilities=["SYS_ADMIN"])},
        {"run_as_user": api.Int64Value(value=1000)},
    ):
        container = server.launch(pod, container_config(server, linux=context(**fields)))
        out = server.output(container, "sh", "-c", show)
        assert "CapInh:\t0000000000000000" in out and "CapAmb:\t0000000000000000" in out, out
        assert re.search(r"Groups:\t0? ?$", out, re.MULTILINE), out
        assert (
            server.output(container, "sh", "-c", "cat /proc/1/status | grep CapInh")
            == "CapInh:\t0000000000000000\n"
        )


# ---- values of requests


def test_annotations_do_not_change_the_specification(server: Server, pod: str) -> None:
    """CVE-2024-3154, CVE-2026-53492's kin: pod and container have annotations that a runtime or
    systemd would carry out. The container's specification has none of them."""
    orders = {
        "org.systemd.property.ExecStartPre": "'/bin/sh'", "run.oci.delegate-cgroup": "../..",
        "run.oci.hooks.stderr": "/etc/x",
        "run.oci.mount_context_type": "x", "io.kubernetes.cri-o.userns-mode": "host",
        "io.podman.annotations.label": "disable",
        "org.criu.config": "/etc/evil", "run.oci.systemd.subgroup": "..",
        "module.wasm.image/variant": "compat",
    }  # fmt: skip
    other = server.run_pod(server.pod_config(annotations=orders), host_network=True)
    container = server.launch(other, container_config(server, *["sleep", "60"], annotations=orders))
    spec = json.loads((server.state / "containers" / container / "config.json").read_text())
    assert not set(orders) & set(spec["annotations"])
    server.stop_pod(other)
    server.remove_pod(other)


def test_labels_of_an_image_are_not_the_containers(server: Server, pod: str) -> None:
    """CVE-2026-53488: LABELs of the image look like labels of the server, and one would send the
    log to a program. The container has only the caller's labels and annotations, and its log is at
    the caller's path."""
    labels = {
        "io.kubernetes.cri.container-type": "sandbox",
        "containerd.io/restart.loguri": "binary:///bin/sh",
        "pyrunc.log_path": "/etc/evil",
    }
    container = server.launch(
        pod, container_config(server, *["true"], image=image(server, Labels=labels))
    )
    status = server.wait_exit(container)
    assert not set(labels) & (set(status.labels) | set(status.annotations))
    spec = json.loads((server.state / "containers" / container / "config.json").read_text())
    assert spec["annotations"]["io.kubernetes.cri.container-type"] == "container"
    assert status.log_path.startswith(str(server.logs))


@pytest.mark.parametrize(
    "path",
    [
        "../../../tmp/x",
        "/etc/passwd",
        "a/../../b",
        "binary:///bin/sh",
        "x\0y",
        "..",
        "c/../../../x",
        "\n",
    ],
)
def test_a_log_path_stays_in_the_pods_log_folder(server: Server, pod: str, path: str) -> None:
    """CVE-2025-0750, CVE-2026-53488: log paths climb by `..` or name a program. The server refuses
    them, or the log is a file below the pod's log folder."""
    try:
        container = server.create(pod, container_config(server, *["true"], log_path=path))
    except (grpc.RpcError, ValueError):
        return
    real = os.path.realpath(server.status(container).log_path)
    assert real.startswith(str(server.logs) + "/"), real


def test_a_link_at_the_path_of_a_log_is_not_followed(
    server: Server, pod: str, canary: Canary
) -> None:
    """CVE-2024-5154, CVE-2025-0750: a pod that may write to the node's logs leaves a link at the
    path of a new log, or of a log that is reopened after its rotation. The start fails, reopening
    fails, and the canary behind the link is untouched."""
    folder = Path(server.status(server.create(pod, container_config(server))).log_path).parent
    (folder / "linked.log").symlink_to(canary.path / "passwd")
    code, lines = outcome(server, pod, "echo", "into the canary", log_path="linked.log")
    assert code != 0, lines
    container = server.launch(
        pod,
        container_config(
            server, *["sh", "-c", "while sleep 0.1; do echo x; done"], log_path="plain.log"
        ),
    )
    (folder / "plain.log").unlink()
    (folder / "plain.log").symlink_to(canary.path / "ptmx")
    with pytest.raises(grpc.RpcError):
        server.runtime.ReopenContainerLog(
            api.ReopenContainerLogRequest(container_id=container), timeout=5
        )


def test_failed_starts_leave_no_descriptors(server: Server, pod: str) -> None:
    """A container cannot be started, because its log is a folder, and the caller tries again and
    again. The shim and the server have no more open descriptors than after the first attempt."""
    shim = json.loads((server.state / "sandboxes" / pod / "shim.json").read_text())["pid"]

    def fail() -> None:
        container = server.create(pod, container_config(server, log_path="folder.log"))
        Path(server.status(container).log_path).mkdir(exist_ok=True)
        assert "log" in message_of(lambda: server.start_container(container))
        server.remove_container(container)

    def open_descriptors() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (shim, server.pid)]

    fail()
    before = open_descriptors()
    for _ in range(5):
        fail()
    assert wait_until(lambda: open_descriptors() <= before, 10), (before, open_descriptors())


def test_links_in_the_folders_of_a_log_are_not_followed(
    server: Server, pod: str, canary: Canary
) -> None:
    """CVE-2024-5154 with a folder: a folder of a container's log becomes a link to the canary's
    folder, before the start or before the log is reopened. The start or the reopening fails and
    makes no file in the canary's folder."""
    folder = Path(server.status(server.create(pod, container_config(server))).log_path).parent
    (folder / "linked").symlink_to(canary.path)
    assert outcome(server, pod, "echo", "into the canary", log_path="linked/0.log")[0] != 0
    assert outcome(server, pod, "echo", "into the canary", log_path="linked/new/0.log")[0] != 0
    container = server.launch(
        pod, container_config(server, *["sleep", "60"], log_path="plain/deep/0.log")
    )
    (folder / "plain").rename(folder / "taken")
    (folder / "plain").symlink_to(canary.path)
    late = server.create(pod, container_config(server, *["true"], log_path="x.log"))
    folder.rename(folder.with_name("taken"))
    folder.symlink_to(canary.path)
    try:
        assert "log" in message_of(lambda: server.start_container(late))
        with pytest.raises(grpc.RpcError):
            server.runtime.ReopenContainerLog(
                api.ReopenContainerLogRequest(container_id=container), timeout=5
            )
    finally:
        folder.unlink()
        folder.with_name("taken").rename(folder)


@pytest.mark.parametrize("field", ["name", "namespace", "uid"])
def test_names_of_pods_cannot_leave_the_servers_folders(server: Server, field: str) -> None:
    """CVE-2025-0750: metadata of a pod, which becomes part of paths, climbs by `..`. Whether the
    server refuses the pod or not, no file with this name is made, neither in the server's folders
    nor outside."""
    text = f"{CLIMB}/tmp/pyrunc-escaped-{field}"
    config = server.pod_config("tricks")
    setattr(config.metadata, field, text)
    try:
        pod = server.run_pod(config, host_network=True)
    except grpc.RpcError as error:
        assert error.code() == INVALID  # type: ignore[attr-defined]
    else:
        server.stop_pod(pod)
        server.remove_pod(pod)
    assert not os.path.lexists(f"/tmp/pyrunc-escaped-{field}")
    assert not list(server.folder.rglob("*escaped*"))


def test_a_pod_cannot_set_sysctls_of_the_machine(server: Server) -> None:
    """CVE-2022-0811 (cr8escape) by CRI: sysctls of a pod name settings of the machine, also within
    other values. RunPodSandbox fails, and core_pattern stays the same."""
    for sysctls in (
        {"kernel.shm_rmid_forced": "1+kernel.core_pattern=|/evil"},
        {"kernel/core_pattern": "|/evil"}, {"net.ipv4..//../kernel/core_pattern": "x"},
        {"kernel.shm_rmid_forced": "1\nkernel.core_pattern=x"}, {"kernel.core_pattern": "|/evil"},
        {"net/../kernel/core_pattern": "x"},
    ):  # fmt: skip
        # A fixture checks core_pattern around each test.
        config = server.pod_config("sysctls", linux=api.LinuxPodSandboxConfig(sysctls=sysctls))
        with pytest.raises(grpc.RpcError):
            server.run_pod(config, host_network=True)


# ---- values of images


@pytest.mark.parametrize(
    "cwd",
    ["/proc/self/fd/7", "/proc/self/fd/5/../../..", "/link", "../../..", "/proc/1/root/../.."],
)
def test_the_working_directory_of_an_image_cannot_be_a_descriptor_of_the_host(
    server: Server, pod: str, canary: Canary, cwd: str
) -> None:
    """CVE-2024-21626 by WORKDIR: the container does not start, or `..` does not lead from its
    working directory to the host's canary, which is untouched."""
    spec = image(server, {"link": build.symlink("/proc/self/fd/8")}, WorkingDir=cwd)
    code, lines = outcome(
        server, pod, "sh", "-c", f"cat {CLIMB}{canary.path}/passwd 2>/dev/null; pwd -P", image=spec
    )
    assert not any("canary" in line for line in lines if not line.startswith(("INV", "NOT"))), lines
    assert code != 0 or lines[-1].startswith("/"), lines


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"WorkingDir": "/d" * 5000}, "the image's WorkingDir has 10000 bytes"),
        ({"WorkingDir": "/" + "n" * 256}, "the image's WorkingDir has a name of 256 bytes"),
        ({"Volumes": {"/d" * 5000: {}}}, "a volume that the image declares has 10000 bytes"),
        ({"Entrypoint": ["/d" * 5000]}, "the image's entrypoint has 10000 bytes"),
    ],
    ids=["WORKDIR", "a name in WORKDIR", "VOLUME", "ENTRYPOINT"],
)
def test_a_path_of_an_image_longer_than_path_max_is_refused(
    server: Server, pod: str, config: dict[str, Any], field: str
) -> None:
    """An image's path is longer than PATH_MAX, or a name in it longer than NAME_MAX.
    CreateContainer refuses it before it spends time on each component, and the error names the
    field."""
    container = container_config(server, image=image(server, **config))
    del container.command[:], container.args[:]
    error = message_of(lambda: server.create(pod, container))
    assert error.startswith(field)


@pytest.mark.requirement("6.8")
@pytest.mark.parametrize("target", ["{canary}", CLIMB + "{canary}", "/proc/self/root{canary}"])
def test_links_at_etc_and_mount_points_do_not_reach_the_host(
    server: Server, pod: str, canary: Canary, target: str
) -> None:
    """CVE-2024-5154, CVE-2022-23648: /etc, a volume's path and /var/run/secrets of the image are
    links to the host. The canary is untouched; a requested mount shows its own content, or the
    container is refused."""
    link = build.symlink(target.format(canary=canary.path))
    spec = image(
        server,
        {"etc": link, "data": link, "var/run": link},
        Volumes={f"{CLIMB}/etc": {}, "/data": {}},
    )
    source = server.folder / "volume"
    source.mkdir(exist_ok=True)
    (source / "file").write_text("mine\n")
    mounts = [
        api.Mount(container_path=p, host_path=str(source))
        for p in ("/data/x", "/var/run/secrets/y", f"/{CLIMB}/data/z")
    ]
    code, lines = outcome(server, pod, "cat", "/data/x/file", image=spec, mounts=mounts)
    assert code != 0 or lines == ["mine"], lines


def test_a_source_swapped_before_the_start_is_not_mounted(
    server: Server, pod: str, canary: Canary
) -> None:
    """CVE-2021-25741: between CreateContainer and StartContainer a neighbour replaces a volume's
    host path by a link to the host's canary. The start fails with the reason, or, with an id-mapped
    volume, the container sees the original folder."""
    folder = server.folder / "swapped"
    (folder / "real").mkdir(parents=True)
    (folder / "real/file").write_text("mine\n")
    (folder / "link").symlink_to("real")
    # A link that existed before CreateContainer is followed.
    private = api.Mount(container_path="/v", host_path=str(folder / "link"))
    assert outcome(server, pod, "cat", "/v/file", mounts=[private]) == (0, ["mine"])
    (folder / "real").rename(folder / "d")
    for options in ({}, {"uidMappings": [api.IDMapping(host_id=0, container_id=0, length=1)],
                         "gidMappings": [api.IDMapping(host_id=0, container_id=0,
                         length=1)]}):  # fmt: skip
        mount = api.Mount(container_path="/v", host_path=str(folder / "d"), **options)
        container = server.create(pod, container_config(server, "cat", "/v/passwd", mounts=[mount]))
        (folder / "d").rename(folder / "taken")
        (folder / "d").symlink_to(canary.path)
        if options:
            # CreateContainer has opened an id-mapped source.
            server.start_container(container)
            # no such file in the folder that was there
            assert server.wait_exit(container).exit_code == 1
        else:
            assert "no link" in message_of(lambda c=container: server.start_container(c))  # type: ignore[misc]
            assert server.status(container).exit_code == 128
        (folder / "d").unlink()
        (folder / "taken").rename(folder / "d")


def test_a_source_swapped_before_the_shim_opens_its_files_is_not_mounted(
    server: Server, pod: str, canary: Canary
) -> None:
    """CVE-2021-25741: between the server's lookup of a volume's host path and the shim's work, a
    neighbour replaces the path by a link to the host's canary. The start fails, or, with an
    id-mapped volume, the container sees the original folder."""
    folder = server.folder / "swapped early"
    (folder / "d").mkdir(parents=True)
    mapping = [api.IDMapping(host_id=0, container_id=0, length=1)]
    for options in ({}, {"uidMappings": mapping, "gidMappings": mapping}):  # type: ignore[var-annotated]
        mount = api.Mount(container_path="/v", host_path=str(folder / "d"), **options)
        shim = shim_pid(server, pod)
        count = len(looked_up(server))
        os.kill(shim, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as pool:
                creating = pool.submit(
                    server.create, pod, container_config(server, "cat", "/v/passwd", mounts=[mount])
                )
                assert wait_until(lambda n=count: len(looked_up(server)) > n, 30, 0.001)  # type: ignore[misc]
                (folder / "d").rename(folder / "taken")
                (folder / "d").symlink_to(canary.path)
                os.kill(shim, signal.SIGCONT)
                container = creating.result(30)
            if options:
                # The shim opens no path: it gets a clone of the server's descriptor.
                server.start_container(container)
                # no such file in the folder that was there
                assert server.wait_exit(container).exit_code == 1
            else:
                assert "no link" in message_of(lambda c=container: server.start_container(c))  # type: ignore[misc]
        finally:
            os.kill(shim, signal.SIGCONT)
        (folder / "d").unlink()
        (folder / "taken").rename(folder / "d")


def looked_up(server: Server) -> list[Path]:
    """Return the launch.json of each container that has one."""
    return list(server.state.glob("containers/*/launch.json"))


def test_a_missing_source_is_not_made_behind_a_swapped_link(tmp_path: Path, canary: Canary) -> None:
    """CVE-2024-45310's kin on the host: while the server makes a missing host path, a neighbour
    puts a link to the canary on the way. The call fails, and no folder is made behind the link."""
    sources.make_folders(str(tmp_path / "a/b/c"))
    sources.make_folders(str(tmp_path / "a/b/c"))
    assert (tmp_path / "a/b/c").is_dir()
    (tmp_path / "a/b").rename(tmp_path / "a/was")
    (tmp_path / "a/b").symlink_to(canary.path)
    # ELOOP or ENOTDIR
    with pytest.raises(OSError):
        sources.make_folders(str(tmp_path / "a/b/new"))


def test_an_image_cannot_replace_proc(server: Server, pod: str) -> None:
    """CVE-2019-16884, CVE-2023-28642 by CRI: a container has mounts at or inside /proc, or the
    image's /proc is a link. No such container runs."""
    source = server.folder / "fake"
    (source / "self/attr").mkdir(parents=True, exist_ok=True)
    for place in ("/proc", "/proc/self", "/proc/sys/kernel", "/data"):
        spec = image(server, {"data": build.symlink("/proc/sys")})
        code, lines = outcome(
            server,
            pod,
            "true",
            image=spec,
            mounts=[api.Mount(container_path=place, host_path=str(source))],
        )
        assert code in (-1, 128), (place, code, lines)
    code, _ = outcome(server, pod, "true", image=image(server, {"proc": build.symlink("/tmp")}))
    assert code in (-1, 128)


def test_an_entrypoint_of_proc_self_exe_runs_no_program_of_the_host(
    server: Server, pod: str
) -> None:
    """CVE-2019-5736 by CRI: the image's entrypoint, or a program of ExecSync, is /proc/self/exe or
    a script with this interpreter. No interpreter of the host runs."""
    script = build.LayerFile(b"#!/proc/self/exe\n", mode=0o755)
    spec = image(server, {"evil": script})
    # The launcher exits with 126 without its descriptors.
    for command in ("/evil", "/proc/self/exe"):
        assert outcome(server, pod, command, image=spec)[0] in (-1, 125, 126, 127, 128)
    container = server.launch(pod, container_config(server, image=spec))
    assert server.exec(container, "/evil").exit_code not in (0, 1)


# ---- limits


@pytest.mark.requirement("4.9.3")
def test_endless_output_of_an_exec_is_cut(server: Server, pod: str) -> None:
    """CVE-2022-1708, CVE-2022-31030: ExecSync runs `yes`. The reply is cut below gRPC's 16 MiB, and
    the server's memory grows by less than four times that."""
    container, before, peak = server.launch(pod, container_config(server)), resident(server), 0
    future = server.runtime.ExecSync.future(
        api.ExecSyncRequest(
            container_id=container, cmd=["sh", "-c", "yes | head -c 40000000"], timeout=60
        )
    )
    while not future.done():
        peak = max(peak, resident(server))
        time.sleep(0.02)
    answer = future.result()
    assert len(answer.stdout) <= 16 << 20 and answer.stdout.startswith(b"y\ny\n")
    assert peak - before < 64 << 20


@pytest.mark.requirement("8.8")
def test_seccomp_profiles_that_are_no_files_are_refused(server: Server, pod: str) -> None:
    """A seccomp profile is a pipe, a device or a folder. CreateContainer fails with
    INVALID_ARGUMENT at once."""
    pipe = server.folder / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", "/tmp", "/proc/kmsg"):
        profile = api.SecurityProfile(
            profile_type=api.SecurityProfile.Localhost, localhost_ref=path
        )
        begin = time.monotonic()
        assert (
            code_of(
                lambda p=profile: server.create(
                    pod, container_config(server, linux=context(seccomp=p))
                )
            )
            == INVALID
        )  # type: ignore[misc]
        assert time.monotonic() - begin < 20


def test_a_pods_files_cannot_fill_the_state_directory(server: Server, pod: str) -> None:
    """CVE-2020-8557's kin: a container writes without end to /etc/hosts, hostname and resolv.conf,
    which are files of the node. None of them is in the state directory, whose tmpfs other services
    of the host share."""
    script = (
        "for f in /etc/hosts /etc/hostname /etc/resolv.conf; do echo x >> $f && stat -c %d $f; done"
    )
    container = server.launch(pod, container_config(server))
    devices = server.output(container, "sh", "-c", script).split()
    assert devices == [str(server.root.stat().st_dev)] * 3
    places = {
        Path(m["source"])
        for m in json.loads((server.state / "containers" / container / "config.json").read_text())[
            "mounts"
        ]
        if m["type"] == "bind"
    }
    assert places and not [p for p in places if p.is_relative_to(server.state)]


def test_a_container_cannot_join_a_namespace_of_another_pod(server: Server, pod: str) -> None:
    """A container demands the pid namespace of a container in another pod. The server refuses the
    request."""
    mine = server.launch(pod, container_config(server))
    other = server.run_pod(host_network=True)
    options = api.NamespaceOption(pid=api.TARGET, target_id=mine, network=api.NODE)
    config = container_config(server, linux=context(namespace_options=options))
    assert code_of(lambda: server.create(other, config)) in (INVALID, grpc.StatusCode.NOT_FOUND)
    server.stop_pod(other)
    server.remove_pod(other)


def test_a_token_opens_only_its_own_stream_and_only_once(server: Server, pod: str) -> None:
    """A client uses the token of an exec for another kind of stream, uses it twice, or guesses a
    token. Each such request gets the same error response."""
    container = server.launch(pod, container_config(server))
    url = server.runtime.Exec(
        api.ExecRequest(container_id=container, cmd=["true"], stdout=True)
    ).url
    assert len(url.rpartition("/")[2]) >= 22, "at least 128 bits"
    _, _, place, path = url.split("/", 3)
    host, _, port = place.partition(":")
    kind, _, token = path.partition("/")

    def answer(path: str) -> str:
        lines = [
            f"POST /{path} HTTP/1.1",
            f"Host: {place}",
            "Connection: Upgrade",
            "Upgrade: SPDY/3.1",
            "X-Stream-Protocol-Version: v4.channel.k8s.io",
            "Content-Length: 0",
        ]
        request = "".join(f"{line}\\r\\n" for line in [*lines, ""])
        return server.output(
            container,
            "sh",
            "-c",
            f"printf '{request}' | timeout 2 nc {host} {port} | head -1; true",
        ).strip()

    wrong = [
        f"attach/{token}",
        f"portforward/{token}",
        f"{kind}/{token[:-1]}{'A' if token[-1] != 'A' else 'B'}",
        f"{kind}/",
        f"{kind}//{token}",
        f"x/../{kind}/{token}",
    ]
    refusals = {answer(guess) for guess in wrong}
    assert refusals and all(re.match(r"HTTP/1.1 40[0-9]", text) for text in refusals), refusals
    assert answer(path).startswith("HTTP/1.1 101"), (
        "the right token must work, or the test proves nothing"
    )
    assert answer(path) in refusals
    request = api.PortForwardRequest(pod_sandbox_id=pod, port=[70000])
    assert "port" in message_of(lambda: server.runtime.PortForward(request))


def test_a_container_of_the_server_has_only_its_stdio(server: Server, pod: str) -> None:
    """A container of the server and a command of ExecSync have only the descriptors 0, 1 and 2."""
    container = server.launch(
        pod, container_config(server, *["sh", "-c", "cd /proc/self/fd; echo *; sleep 60"])
    )
    assert wait_until(lambda: server.log_lines(container), 60)
    assert (
        server.log_lines(container)[0].split()[:3] == ["0", "1", "2"]
        and len(server.log_lines(container)[0].split()) <= 4
    )
    assert len(server.output(container, "sh", "-c", "cd /proc/self/fd; echo *").split()) <= 4
