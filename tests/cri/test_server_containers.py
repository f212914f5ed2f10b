"""What a container looks like from inside: files, mounts, users, capabilities, namespaces, limits."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server, code_of, image_archive, message_of

CDI = "/run/pyrunc-test-cdi"


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server(settings={"containers": {"cdi_dirs": [CDI]}}) as server:
        server.load_image()
        yield server


def secured(
    server: Server, command: tuple[str, ...] = ("sleep", "3600"), **fields: object
) -> api.ContainerConfig:
    config = server.container_config(command)
    config.linux.security_context.MergeFrom(api.LinuxContainerSecurityContext(**fields))  # type: ignore[arg-type]
    return config


def test_files_of_the_pod(server: Server) -> None:
    config = server.pod_config(
        hostname="myhost",
        dns_config=api.DNSConfig(
            servers=["10.10.10.10"], searches=["google.com", "b.c"], options=["ndots:8"]
        ),
    )
    container = server.launch(server.run_pod(config))
    assert server.output(container, "hostname") == "myhost\n"
    assert server.output(container, "cat", "/etc/hostname") == "myhost\n"
    expected = "search google.com b.c\nnameserver 10.10.10.10\noptions ndots:8\n"
    assert server.output(container, "cat", "/etc/resolv.conf") == expected
    assert server.output(container, "cat", "/etc/hosts") == Path("/etc/hosts").read_text()


def test_a_pod_on_the_nodes_network_has_its_name(server: Server) -> None:
    """Another would be in the files and the environment, but not what hostname(1) says."""
    with pytest.raises(grpc.RpcError) as refused:
        server.run_pod(server.pod_config(hostname="another"), host_network=True)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'another'" in refused.value.details() and not server.pods()
    for name in ("", socket.gethostname()):
        container = server.launch(server.run_pod(server.pod_config(hostname=name), host_network=True))
        assert server.output(container, "hostname").strip() == socket.gethostname()


def test_dns_by_presence(server: Server) -> None:
    none = server.launch(server.run_pod(server.pod_config(dns_config=api.DNSConfig())))
    assert server.output(none, "cat", "/etc/resolv.conf") == ""
    pod = server.run_pod()
    absent = server.launch(pod)
    assert server.output(absent, "cat", "/etc/resolv.conf") == Path("/etc/resolv.conf").read_text()
    assert server.output(absent, "hostname").strip() == pod[:12]


def test_mounts_of_the_caller(server: Server) -> None:
    folder = server.folder / "mounts"
    folder.mkdir()
    (folder / "file").write_text("from the host\n")
    (folder / "log").touch()
    config = server.container_config(
        mounts=[
            api.Mount(container_path="/etc/hosts", host_path=str(folder / "file")),
            api.Mount(container_path="/dev/termination-log", host_path=str(folder / "log")),
            api.Mount(container_path="/ro", host_path=str(folder), readonly=True),
            api.Mount(container_path="/deep/er/dir", host_path=str(folder / "made")),
        ]
    )
    container = server.launch(server.run_pod(), config)
    assert server.output(container, "cat", "/etc/hosts") == "from the host\n"
    server.output(container, "sh", "-c", "echo bye > /dev/termination-log; touch /deep/er/dir/x")
    assert (folder / "log").read_text() == "bye\n" and (folder / "made" / "x").exists()
    assert server.exec(container, "touch", "/ro/y").exit_code == 1
    status = server.status(container)
    assert [m.container_path for m in status.mounts] == [m.container_path for m in config.mounts]
    assert status.mounts[2].readonly and status.mounts[2].host_path == str(folder)


def test_recursive_read_only_and_plain(server: Server) -> None:
    folder = server.folder / "rro"
    (folder / "inner").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder / "inner"], check=True)
    try:
        config = server.container_config(
            mounts=[
                api.Mount(container_path="/plain", host_path=str(folder), readonly=True),
                api.Mount(
                    container_path="/rro", host_path=str(folder), readonly=True, recursive_read_only=True
                ),
            ]
        )
        container = server.launch(server.run_pod(), config)
        assert server.exec(container, "touch", "/plain/x").exit_code == 1
        assert server.exec(container, "touch", "/plain/inner/x").exit_code == 0
        assert server.exec(container, "touch", "/rro/inner/y").exit_code == 1
        server.remove_all()
    finally:
        subprocess.run(["umount", folder / "inner"], check=True)


def test_propagation_needs_a_shared_source(server: Server) -> None:
    folder = server.folder / "private"
    folder.mkdir()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-private", folder], check=True)
    try:
        mount = api.Mount(
            container_path="/m", host_path=str(folder), propagation=api.PROPAGATION_HOST_TO_CONTAINER
        )
        pod = server.run_pod()
        text = message_of(lambda: server.create(pod, server.container_config(mounts=[mount])))
        assert "is mounted on no shared or slave mount" in text
        subprocess.run(["mount", "--make-shared", folder], check=True)
        container = server.launch(pod, server.container_config(mounts=[mount]))
        (folder / "later").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "later", folder / "later"], check=True)
        try:
            assert "/m/later" in server.output(container, "cat", "/proc/mounts")
        finally:
            subprocess.run(["umount", folder / "later"], check=True)
        server.remove_all()
    finally:
        subprocess.run(["umount", folder], check=True)


def test_shared_memory_belongs_to_the_pod(server: Server) -> None:
    pod = server.run_pod()
    first = server.launch(pod)
    second = server.launch(pod, server.container_config(metadata=api.ContainerMetadata(name="second")))
    other = server.launch(server.run_pod())
    server.output(first, "sh", "-c", "echo shared > /dev/shm/x")
    assert server.output(second, "cat", "/dev/shm/x") == "shared\n"
    assert server.exec(other, "cat", "/dev/shm/x").exit_code == 1
    assert "65536" in server.output(first, "df", "-k", "/dev/shm")


def test_process_namespaces(server: Server) -> None:
    config = server.pod_config()
    config.linux.security_context.namespace_options.pid = api.POD
    pod = server.run_pod(config)
    shared = server.container_config()
    shared.linux.security_context.namespace_options.pid = api.POD
    container = server.launch(pod, shared)
    assert "pause" in server.output(container, "cat", "/proc/1/cmdline")
    alone_pod = server.run_pod()
    alone = server.launch(alone_pod)
    assert server.output(alone, "cat", "/proc/1/cmdline").startswith("sleep")
    silent = server.container_config(metadata=api.ContainerMetadata(name="silent"))
    silent.linux.security_context.namespace_options.pid = api.POD
    assert "pause" in server.output(server.launch(alone_pod, silent), "cat", "/proc/1/cmdline")
    debug = server.container_config(metadata=api.ContainerMetadata(name="debug"))
    debug.linux.security_context.namespace_options.pid = api.TARGET
    debug.linux.security_context.namespace_options.target_id = alone
    seen = server.output(server.launch(alone_pod, debug), "cat", "/proc/1/cmdline")
    assert seen.startswith("sleep")
    wrong = server.container_config(metadata=api.ContainerMetadata(name="wrong"))
    wrong.linux.security_context.namespace_options.pid = api.TARGET
    wrong.linux.security_context.namespace_options.target_id = container
    assert code_of(lambda: server.create(alone_pod, wrong)) == grpc.StatusCode.INVALID_ARGUMENT


def test_users_and_groups(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, secured(server, run_as_username="www", supplemental_groups=[1234]))
    assert server.output(container, "id") == "uid=33(www) gid=33(www) groups=33(www),50(extra),1234\n"
    assert server.output(container, "sh", "-c", "echo $HOME") == "/home/www\n"
    status = server.status(container).user.linux
    assert (status.uid, status.gid, list(status.supplemental_groups)) == (33, 33, [33, 1234, 50])


def test_capabilities_seccomp_and_no_new_privileges(server: Server) -> None:
    def status_of(container: str) -> dict[str, str]:
        text = server.output(container, "cat", "/proc/self/status")
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)

    pod = server.run_pod()
    dropped = secured(
        server, capabilities=api.Capability(drop_capabilities=["ALL"]), no_new_privs=True,
        seccomp=api.SecurityProfile(profile_type=api.SecurityProfile.RuntimeDefault),
    )  # fmt: skip
    found = status_of(server.launch(pod, dropped))
    assert (int(found["CapBnd"], 16), found["NoNewPrivs"], found["Seccomp"]) == (0, "1", "2")
    plain = secured(server)
    plain.metadata.name = "plain"
    found = status_of(server.launch(pod, plain))
    assert (found["CapEff"], found["NoNewPrivs"], found["Seccomp"]) == ("00000000a80425fb", "0", "0")


def test_read_only_root_and_masked_paths(server: Server) -> None:
    config = secured(
        server,
        readonly_rootfs=True,
        masked_paths=["/etc/group", "/home", "/proc/sysrq-trigger", "/absent"],
        readonly_paths=["/proc/sys"],
    )
    container = server.launch(server.run_pod(), config)
    answer = server.exec(container, "touch", "/file")
    assert answer.exit_code == 1 and b"Read-only file system" in answer.stderr
    assert server.exec(container, "touch", "/dev/shm/fine").exit_code == 0
    assert server.exec(container, "sh", "-c", "echo 1 > /proc/sys/kernel/panic").exit_code != 0

    assert server.output(container, "cat", "/etc/group") == "" == server.output(container, "ls", "/home")


def test_privileged(server: Server) -> None:
    config = server.pod_config()
    config.linux.security_context.privileged = True
    before = _block_devices()
    container = server.launch(server.run_pod(config), secured(server, privileged=True))
    ours = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")
    )
    assert server.output(container, "grep", "CapEff", "/proc/self/status").strip() == ours.strip()
    assert server.exec(container, "sh", "-c", "mount -t tmpfs none /tmp").exit_code == 0
    listed = set(server.output(container, "ls", "/dev").split())
    assert before & _block_devices() <= listed  # others may make and remove some


def _block_devices() -> set[str]:
    return {name for name in os.listdir("/dev") if Path("/dev", name).is_block_device()}


def test_devices(server: Server) -> None:
    device = api.Device(host_path="/dev/null", container_path="/dev/my/null", permissions="rw")
    container = server.launch(server.run_pod(), server.container_config(devices=[device]))
    assert server.output(container, "stat", "-c", "%t:%T", "/dev/my/null") == "1:3\n"
    server.output(container, "sh", "-c", "echo x > /dev/my/null")


def test_cdi_devices(server: Server) -> None:
    folder = Path(CDI)
    folder.mkdir()
    try:
        node = {"path": "/dev/vendor0", "hostPath": "/dev/zero"}
        edits = {
            "env": ["VENDOR=here"],
            "deviceNodes": [node],
            "mounts": [{"hostPath": "/etc", "containerPath": "/v"}],
        }
        document = {
            "cdiVersion": "0.8.0",
            "kind": "vendor.com/dev",
            "devices": [{"name": "d", "containerEdits": edits}],
        }
        (folder / "vendor.json").write_text(json.dumps(document))
        pod = server.run_pod()
        config = server.container_config(CDI_devices=[api.CDIDevice(name="vendor.com/dev=d")])
        container = server.launch(pod, config)
        assert (
            server.output(container, "sh", "-c", "echo $VENDOR; head -c 4 /dev/vendor0 | wc -c; ls /v/passwd")
            == "here\n4\n/v/passwd\n"
        )
        absent = server.container_config(
            CDI_devices=[api.CDIDevice(name="vendor.com/dev=x")], metadata=api.ContainerMetadata(name="x")
        )
        assert "unresolvable CDI device" in message_of(lambda: server.create(pod, absent))
    finally:
        shutil.rmtree(folder)


def test_an_image_as_a_volume(server: Server) -> None:
    mount = api.Mount(container_path="/volume", readonly=True, image=api.ImageSpec(image=IMAGE))
    part = api.Mount(
        container_path="/part", readonly=True, image=api.ImageSpec(image=IMAGE), image_sub_path="etc"
    )
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(mounts=[mount, part]))
    assert server.output(container, "/volume/bin/busybox", "echo", "works") == "works\n"
    assert server.exec(container, "touch", "/volume/x").exit_code == 1
    assert "www" in server.output(container, "cat", "/part/passwd")
    assert server.status(container).mounts[0].image.image_ref.startswith("sha256:")
    part.image_sub_path = "absent"
    config = server.container_config(mounts=[part], metadata=api.ContainerMetadata(name="b"))
    assert message_of(lambda: server.create(pod, config)).startswith("ImageVolumeMountFailed")
    used = api.RemoveImageRequest(image=api.ImageSpec(image=IMAGE))
    assert code_of(lambda: server.image.RemoveImage(used)) == grpc.StatusCode.FAILED_PRECONDITION


def test_a_volume_of_an_image_with_several_layers(server: Server) -> None:
    name = "registry.test/layered:1"
    server.load_image(
        image_archive(
            name,
            {"d/s/one": b"1", "d/s/gone": b"x", "other": b"o"},
            {"d/s/two": b"2", "d/s/.wh.gone": b"", "d/s/one": b"new"},
        )
    )
    image = api.ImageSpec(image=name)
    mounts = [
        api.Mount(container_path="/whole", readonly=True, image=image),
        api.Mount(container_path="/part", readonly=True, image=image, image_sub_path="d/s"),
    ]
    container = server.launch(server.run_pod(), server.container_config(mounts=mounts))
    assert server.output(container, "ls", "/part", "/whole/d/s").split() == [
        "/part:",
        "one",
        "two",
        "/whole/d/s:",
        "one",
        "two",
    ]
    assert server.output(container, "cat", "/part/one", "/whole/other") == "newo"
    assert server.exec(container, "touch", "/part/x").exit_code == 1


def test_a_colon_in_a_sub_path_names_one_folder(server: Server) -> None:
    host = server.folder / "host"
    host.mkdir()
    (host / "secret").touch()
    (server.folder / "a").mkdir()
    part, long = f"a:{host}", "/".join(("n" * 200, "b\\:c,d", "n" * 200))
    files = {f"{part}/image": b"", "a/x": b"", f"{long}/deep": b""}
    server.load_image(image_archive("registry.test/colon:1", files, {**files, f"{part}/top": b""}))
    image = api.ImageSpec(image="registry.test/colon:1")
    mounts = [
        api.Mount(container_path=f"/{n}", readonly=True, image=image, image_sub_path=path)
        for n, path in enumerate((part, long))
    ]
    container = server.launch(server.run_pod(), server.container_config(mounts=mounts))
    assert server.output(container, "ls", "/0", "/1").split() == ["/0:", "image", "top", "/1:", "deep"]


def test_environment_and_arguments(server: Server) -> None:
    config = server.container_config(
        ["sh", "-c", "env; pwd; exit 0"],
        envs=[api.KeyValue(key="MINE", value=b"1"), api.KeyValue(key="EMPTY", value=b"")],
        working_dir="/made/here",
    )
    container = server.launch(server.run_pod(), config)
    server.wait_exit(container)
    lines = server.log_lines(container)
    assert {"MINE=1", "EMPTY=", "FROM_IMAGE=yes", "PATH=/bin", "/made/here"} <= set(lines)


def test_sysctls_of_the_pod(server: Server) -> None:
    config = server.pod_config(
        linux=api.LinuxPodSandboxConfig(sysctls={"net.ipv4.ip_forward": "1", "kernel.shmmax": "4096000"})
    )
    config.linux.security_context.namespace_options.pid = api.CONTAINER
    container = server.launch(server.run_pod(config))
    assert server.output(container, "cat", "/proc/sys/net/ipv4/ip_forward") == "1\n"
    assert server.output(container, "cat", "/proc/sys/kernel/shmmax") == "4096000\n"


def test_sysctls_of_the_network_may_name_the_pods_interface(server: Server) -> None:
    """Which is there before they are set; and what they forbid is forbidden on that interface, too."""
    asked = {"net.ipv4.conf.eth0.log_martians": "1", "net/ipv6/conf/all/disable_ipv6": "1"}
    pod = server.run_pod(server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls=asked)))
    container = server.launch(pod)
    assert server.output(container, "cat", "/proc/sys/net/ipv4/conf/eth0/log_martians") == "1\n"
    assert server.output(container, "cat", "/proc/net/if_inet6") == ""
    server.remove_pod(pod)
    asked = {"net.ipv4.conf.eth7.log_martians": "1"}
    config = server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls=asked))
    assert code_of(lambda: server.run_pod(config)) == grpc.StatusCode.INVALID_ARGUMENT
    assert not server.pods() and not list((server.state / "sandboxes").iterdir())


def test_stdin_stays_open_and_tty_has_a_terminal(server: Server) -> None:
    pod = server.run_pod()
    waiting = server.launch(pod, server.container_config(["sh", "-c", "cat; echo ended"], stdin=True))
    closed = server.launch(
        pod,
        server.container_config(
            ["sh", "-c", "cat; echo ended"], metadata=api.ContainerMetadata(name="x"), log_path="x.log"
        ),
    )
    server.wait_exit(closed)
    assert server.log_lines(closed) == ["ended"]
    time.sleep(0.2)
    assert server.status(waiting).state == api.CONTAINER_RUNNING
    terminal = server.launch(
        pod,
        server.container_config(
            ["tty"], tty=True, metadata=api.ContainerMetadata(name="t"), log_path="t.log"
        ),
    )
    server.wait_exit(terminal)
    assert server.log_lines(terminal)[0].startswith("/dev/")


def test_updates_are_shown(server: Server) -> None:
    container = server.create(server.run_pod())
    request = api.UpdateContainerResourcesRequest(container_id=container)
    request.linux.cpu_shares = 512
    server.runtime.UpdateContainerResources(request)
    request.linux.cpu_shares, request.linux.cpu_quota = 0, 50_000
    server.runtime.UpdateContainerResources(request)
    found = server.status(container).resources.linux
    assert (found.cpu_shares, found.cpu_quota) == (512, 50_000)
    server.start_container(container)
    server.stop_container(container)
    code = code_of(lambda: server.runtime.UpdateContainerResources(request))
    assert code == grpc.StatusCode.FAILED_PRECONDITION


def test_host_ports_are_reachable(server: Server) -> None:
    config = server.pod_config(port_mappings=[api.PortMapping(container_port=8080, host_port=18080)])
    pod = server.run_pod(config)
    server.launch(pod, server.container_config(["sh", "-c", "while :; do echo answer | nc -l -p 8080; done"]))
    for address, port in ((server.pod_status(pod).network.ip, "8080"), ("10.88.0.1", "18080")):
        assert fetch(server, address, port) == b"answer\n", (address, port)


def fetch(server: Server, address: str, port: str) -> bytes:
    """What a TCP server says first, seen from the host; asked again while it does not listen."""
    inside = ["nsenter", f"--net=/proc/{server.pid}/ns/net", "--", "busybox", "nc", "-w", "2", address, port]
    for _ in range(300):
        done = subprocess.run(inside, capture_output=True, stdin=subprocess.DEVNULL)
        if done.stdout:
            return done.stdout
        time.sleep(0.1)
    return b""


@pytest.mark.parametrize("host_network", [False, True])
def test_users_of_the_pods_own(server: Server, host_network: bool) -> None:
    mapping = api.IDMapping(host_id=100_000, container_id=0, length=65_536)
    users = api.UserNamespace(mode=api.POD, uids=[mapping], gids=[mapping])
    pod_config = server.pod_config()
    pod_config.linux.security_context.namespace_options.userns_options.CopyFrom(users)
    pod = server.run_pod(pod_config, host_network=host_network)
    folder = server.folder / "owned"
    folder.mkdir(exist_ok=True)
    mount = api.Mount(
        container_path="/data", host_path=str(folder), uidMappings=[mapping], gidMappings=[mapping]
    )
    config = server.container_config(mounts=[mount])
    refused = server.container_config(metadata=api.ContainerMetadata(name="refused"))
    assert code_of(lambda: server.create(pod, refused)) == grpc.StatusCode.INVALID_ARGUMENT
    config.linux.security_context.namespace_options.userns_options.CopyFrom(users)
    container = server.launch(pod, config)
    assert server.output(container, "cat", "/proc/self/uid_map").split() == ["0", "100000", "65536"]
    server.output(container, "touch", "/data/x", "/dev/shm/x", "/new")
    assert (
        server.output(container, "stat", "-c", "%u", "/", "/bin", "/etc/resolv.conf", "/dev/shm", "/data")
        == "0\n" * 5
    )
    assert (folder / "x").stat().st_uid == 0, "an idmapped mount keeps the host's ids"
    assert (server.root / "containers" / container / "upper" / "new").stat().st_uid == 100_000
    assert server.pod_status(pod).linux.namespaces.options.userns_options == users
