"""CreateContainer: what a container looks like from inside: files, mounts, users, capabilities, namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.rpc.conftest import CDI
from tests.cri.server_harness import IMAGE, Server, code_of, image_archive, message_of


def secured(
    server: Server, command: tuple[str, ...] = ("sleep", "3600"), **fields: object
) -> api.ContainerConfig:
    config = server.container_config(command)
    config.linux.security_context.MergeFrom(api.LinuxContainerSecurityContext(**fields))  # type: ignore[arg-type]
    return config


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
