"""CreateContainer: files, mounts, users, capabilities and namespaces as seen inside the
container."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.rpc.conftest import CDI
from tests.cri.rpc.images import pull, remove
from tests.cri.server_harness import IMAGE, Server, code_of, image_archive, message_of
from tests.support.processes import wait_until
from tests.support.registry import Registry


def secured(
    server: Server, command: tuple[str, ...] = ("sleep", "3600"), **fields: object
) -> api.ContainerConfig:
    config = server.container_config(command)
    config.linux.security_context.MergeFrom(api.LinuxContainerSecurityContext(**fields))  # type: ignore[arg-type]
    return config


@pytest.mark.requirement("4.6.2", "6.1", "6.5", "6.7", "6.8", "6.15")
def test_requested_mounts_are_in_the_container(server: Server) -> None:
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
    assert list(server.status(container).mounts) == list(config.mounts)


@pytest.mark.requirement("6.10")
def test_recursively_read_only_mounts_include_inner_mounts(server: Server) -> None:
    folder = server.folder / "rro"
    (folder / "inner").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder / "inner"], check=True)
    try:
        config = server.container_config(
            mounts=[
                api.Mount(container_path="/plain", host_path=str(folder), readonly=True),
                api.Mount(
                    container_path="/rro",
                    host_path=str(folder),
                    readonly=True,
                    recursive_read_only=True,
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


@pytest.mark.requirement("4.1.8", "6.9")
def test_propagation_needs_a_shared_source(server: Server) -> None:
    folder = server.folder / "private"
    folder.mkdir()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-private", folder], check=True)
    try:
        mount = api.Mount(
            container_path="/m",
            host_path=str(folder),
            propagation=api.PROPAGATION_HOST_TO_CONTAINER,
        )
        pod = server.run_pod()
        text = message_of(lambda: server.create(pod, server.container_config(mounts=[mount])))
        assert "is not on a shared or slave mount" in text
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


@pytest.mark.requirement("8.13", "8.14")
def test_a_container_joins_the_requested_pid_namespace(server: Server) -> None:
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


@pytest.mark.requirement("4.6.5", "8.3", "8.4")
def test_a_container_has_its_user_and_groups(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(
        pod, secured(server, run_as_username="www", supplemental_groups=[1234])
    )
    assert (
        server.output(container, "id") == "uid=33(www) gid=33(www) groups=33(www),50(extra),1234\n"
    )
    assert server.output(container, "sh", "-c", "echo $HOME") == "/home/www\n"
    status = server.status(container).user.linux
    assert (status.uid, status.gid, list(status.supplemental_groups)) == (33, 33, [33, 50, 1234])


@pytest.mark.parametrize("destination", ["/etc/passwd", "/etc"])
def test_home_comes_from_the_passwd_file_that_is_mounted(
    server: Server, tmp_path: Path, destination: str
) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data/passwd").write_text("app:x:1234:0::/srv/app:/bin/sh\n")
    (tmp_path / "passwd").symlink_to("..data/passwd")
    source = tmp_path / "passwd" if destination == "/etc/passwd" else tmp_path
    config = secured(server, run_as_user=api.Int64Value(value=1234))
    config.mounts.add(container_path=destination, host_path=str(source))
    container = server.launch(server.run_pod(), config)
    assert server.output(container, "sh", "-c", "echo $HOME") == "/srv/app\n"


@pytest.mark.requirement("8.2", "8.6", "8.8", "14.3")
def test_a_container_has_its_capabilities_seccomp_and_no_new_privileges(server: Server) -> None:
    def status_of(container: str) -> dict[str, str]:
        text = server.output(container, "cat", "/proc/self/status")
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)

    pod = server.run_pod()
    dropped = secured(
        server, capabilities=api.Capability(drop_capabilities=["ALL"]), no_new_privs=True,
        seccomp=api.SecurityProfile(profile_type=api.SecurityProfile.RuntimeDefault),
    )  # fmt: skip
    status = status_of(server.launch(pod, dropped))
    assert (int(status["CapBnd"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")
    plain = secured(server)
    plain.metadata.name = "plain"
    status = status_of(server.launch(pod, plain))
    assert (status["CapEff"], status["NoNewPrivs"], status["Seccomp"]) == (
        "00000000a80425fb",
        "0",
        "0",
    )


@pytest.mark.requirement("8.5", "8.7", "8.11", "13.9")
def test_a_read_only_root_and_masked_paths_apply(server: Server) -> None:
    config = secured(
        server,
        readonly_rootfs=True,
        masked_paths=["/etc/group", "/home", "/proc/uptime", "/absent"],
        readonly_paths=["/proc/sys"],
    )
    container = server.launch(server.run_pod(), config)
    answer = server.exec(container, "touch", "/file")
    assert answer.exit_code == 1 and b"Read-only file system" in answer.stderr
    assert server.exec(container, "touch", "/dev/shm/fine").exit_code == 0
    assert server.exec(container, "sh", "-c", "echo 1 > /proc/sys/kernel/panic").exit_code != 0

    assert (
        server.output(container, "cat", "/etc/group")
        == ""
        == server.output(container, "ls", "/home")
    )
    places = [
        line.split()[1] for line in server.output(container, "cat", "/proc/mounts").splitlines()
    ]
    of_proc = {"/proc", "/proc/sys", "/proc/uptime"}
    assert {place for place in places if place.startswith("/proc")} == of_proc, (
        "those of the lists and no others"
    )


@pytest.mark.requirement("6.16", "8.1")
def test_a_privileged_container_has_all_capabilities_and_devices(server: Server) -> None:
    config = server.pod_config()
    config.linux.security_context.privileged = True
    before = _block_devices()
    container = server.launch(server.run_pod(config), secured(server, privileged=True))
    ours = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    assert server.output(container, "grep", "CapEff", "/proc/self/status").strip() == ours.strip()
    assert server.exec(container, "sh", "-c", "mount -t tmpfs none /tmp").exit_code == 0
    listed = set(server.output(container, "ls", "/dev").split())
    assert before & _block_devices() <= listed  # others may make and remove some


def _block_devices() -> set[str]:
    return {name for name in os.listdir("/dev") if Path("/dev", name).is_block_device()}


@pytest.mark.requirement("6.16")
def test_a_container_has_the_requested_devices(server: Server) -> None:
    device = api.Device(host_path="/dev/null", container_path="/dev/my/null", permissions="rw")
    container = server.launch(server.run_pod(), server.container_config(devices=[device]))
    assert server.output(container, "stat", "-c", "%t:%T", "/dev/my/null") == "1:3\n"
    server.output(container, "sh", "-c", "echo x > /dev/my/null")


@pytest.mark.requirement("4.1.8", "6.17")
def test_a_cdi_device_adds_its_edits(server: Server) -> None:
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
            server.output(
                container, "sh", "-c", "echo $VENDOR; head -c 4 /dev/vendor0 | wc -c; ls /v/passwd"
            )
            == "here\n4\n/v/passwd\n"
        )
        absent = server.container_config(
            CDI_devices=[api.CDIDevice(name="vendor.com/dev=x")],
            metadata=api.ContainerMetadata(name="x"),
        )
        assert "unresolvable CDI device" in message_of(lambda: server.create(pod, absent))
    finally:
        shutil.rmtree(folder)


@pytest.mark.requirement("6.15")
@pytest.mark.parametrize(("place", "below"), [("/sys", "/sys/fs/cgroup"), ("/dev", "/dev/shm")])
def test_a_folder_of_the_host_can_be_mounted_at_the_same_path(
    server: Server, place: str, below: str
) -> None:
    """Mounts of the host below the folder are visible in the container, too."""
    # cAdvisor, node-exporter and device plugins mount such folders.
    mount = api.Mount(container_path=place, host_path=place, readonly=True)
    container = server.launch(server.run_pod(), server.container_config(mounts=[mount]))
    host = os.stat(below)
    inside = server.output(container, "stat", "-c", "%d %i", below)
    assert inside.split() == [str(host.st_dev), str(host.st_ino)]


@pytest.mark.requirement("4.1.8", "4.6.3", "6.13", "12.1")
def test_an_image_can_be_a_volume(server: Server) -> None:
    mount = api.Mount(container_path="/volume", readonly=True, image=api.ImageSpec(image=IMAGE))
    part = api.Mount(
        container_path="/part",
        readonly=True,
        image=api.ImageSpec(image=IMAGE),
        image_sub_path="etc",
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


def test_an_image_volume_shows_all_layers(server: Server) -> None:
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


@pytest.mark.requirement("6.13")
def test_a_sub_path_with_a_colon_is_a_single_folder(server: Server) -> None:
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
    assert server.output(container, "ls", "/0", "/1").split() == [
        "/0:",
        "image",
        "top",
        "/1:",
        "deep",
    ]


@pytest.mark.requirement("4.1.5", "4.1.7")
def test_a_container_has_its_environment_and_arguments(server: Server) -> None:
    config = server.container_config(
        ["sh", "-c", "env; pwd; exit 0"],
        envs=[api.KeyValue(key="MINE", value=b"1"), api.KeyValue(key="EMPTY", value=b"")],
        working_dir="/made/here",
    )
    container = server.launch(server.run_pod(), config)
    server.wait_exit(container)
    lines = server.log_lines(container)
    assert {"MINE=1", "EMPTY=", "FROM_IMAGE=yes", "PATH=/bin", "/made/here"} <= set(lines)


@pytest.mark.requirement("4.1.6")
def test_stdin_stays_open_and_tty_has_a_terminal(server: Server) -> None:
    pod = server.run_pod()
    waiting = server.launch(
        pod, server.container_config(["sh", "-c", "cat; echo ended"], stdin=True)
    )
    closed = server.launch(
        pod,
        server.container_config(
            ["sh", "-c", "cat; echo ended"],
            metadata=api.ContainerMetadata(name="x"),
            log_path="x.log",
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


@pytest.mark.requirement("4.1.1")
def test_the_stored_configuration_of_the_pod_applies(server: Server) -> None:
    """The copy of the pod's configuration in a CreateContainer request has no effect."""
    pod = server.run_pod(server.pod_config("decides"))
    request = api.CreateContainerRequest(
        pod_sandbox_id=pod,
        config=server.container_config(),
        sandbox_config=server.pod_config(log_directory="/elsewhere", hostname="another"),
    )
    container = server.runtime.CreateContainer(request, timeout=60).container_id
    assert server.status(container).log_path == str(server.logs / "decides" / "c.log")
    nameless = server.container_config()
    nameless.ClearField("metadata")
    assert code_of(lambda: server.create(pod, nameless)) == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.requirement("4.1.4")
def test_commands_of_image_and_request_are_combined(server: Server, registry: Registry) -> None:
    layers = build.busybox().layers
    both = {"Env": ["PATH=/bin"], "Entrypoint": ["echo", "entrypoint"], "Cmd": ["cmd"]}
    registry.push("commands/both:v1", build.image(layers, both))
    registry.push("commands/none:v1", build.image(layers, {}))
    name, empty = (pull(server, f"{registry.host}/commands/{each}:v1") for each in ("both", "none"))
    pod = server.run_pod()
    for number, (command, args, expected_output) in enumerate(
        (
            ([], [], "entrypoint cmd"),
            ([], ["mine"], "entrypoint mine"),
            (["echo", "command"], [], "command"),
            (["echo", "command"], ["mine"], "command mine"),
        )
    ):
        config = server.container_config(
            command, args=args, image=api.ImageSpec(image=name), log_path=f"{number}.log"
        )
        config.metadata.attempt = number
        container = server.launch(pod, config)
        server.wait_exit(container)
        assert server.log_lines(container) == [expected_output]
        server.remove_container(container)
    nothing = server.container_config([], image=api.ImageSpec(image=empty))
    assert code_of(lambda: server.create(pod, nothing)) == grpc.StatusCode.INVALID_ARGUMENT
    remove(server, name)
    remove(server, empty)


@pytest.mark.requirement("4.1.5")
def test_default_variables_are_set_and_requests_override_the_image(server: Server) -> None:
    """HOSTNAME, TERM and PATH are always set; variables of the request replace those of the
    image."""
    envs = [api.KeyValue(key="FROM_IMAGE", value=b"no"), api.KeyValue(key="TWICE", value=b"1")]
    config = server.container_config(["sh", "-c", "env"], envs=envs, tty=True)
    pod = server.run_pod(server.pod_config(hostname="myhost"))
    container = server.launch(pod, config)
    server.wait_exit(container)
    lines = {line.strip() for line in server.log_lines(container)}
    assert {"FROM_IMAGE=no", "TWICE=1", "HOSTNAME=myhost", "TERM=xterm", "PATH=/bin"} <= lines


@pytest.mark.requirement("8.4")
def test_strict_groups_are_only_those_of_the_request(server: Server) -> None:
    """With the policy Strict, neither a container nor its execs get groups of the user in the
    image's /etc/group."""
    config = secured(
        server,
        run_as_username="www",
        supplemental_groups=[1234],
        supplemental_groups_policy=api.Strict,
    )
    container = server.launch(server.run_pod(), config)
    assert server.output(container, "id", "-G").split() == ["33", "1234"]
    assert list(server.status(container).user.linux.supplemental_groups) == [33, 1234]


@pytest.mark.requirement("6.5")
def test_the_pods_files_are_read_only_with_the_root(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, secured(server, readonly_rootfs=True))
    other = server.launch(
        pod, server.container_config(metadata=api.ContainerMetadata(name="other"))
    )
    for path in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):
        assert server.exec(container, "sh", "-c", f"echo x >>{path}").exit_code != 0, path
        server.output(other, "sh", "-c", f"echo '# x' >>{path}")
        assert server.output(container, "cat", path).endswith("# x\n"), (
            "one file for all of the pod"
        )
    server.output(container, "touch", "/dev/shm/x")


@pytest.mark.requirement("6.6")
def test_default_mounts_of_every_container(server: Server) -> None:
    container = server.launch(server.run_pod())
    mounts = {
        line.split()[1]: line.split()[2:4]
        for line in server.output(container, "cat", "/proc/mounts").splitlines()
    }
    kinds = {
        path: mounts[path][0]
        for path in ("/proc", "/sys", "/dev", "/dev/pts", "/dev/mqueue", "/dev/shm")
    }
    assert kinds == {
        "/proc": "proc",
        "/sys": "sysfs",
        "/dev": "tmpfs",
        "/dev/pts": "devpts",
        "/dev/mqueue": "mqueue",
        "/dev/shm": "tmpfs",
    }
    assert mounts["/sys"][1].split(",")[0] == mounts["/sys/fs/cgroup"][1].split(",")[0] == "ro"
    assert server.output(container, "cat", "/proc/self/cgroup").splitlines()[-1].endswith(":/"), (
        "of its own"
    )
    config = server.pod_config()
    config.linux.security_context.privileged = True
    privileged = server.launch(server.run_pod(config), secured(server, privileged=True))
    lines = server.output(privileged, "cat", "/proc/mounts").splitlines()
    mounts = {line.split()[1]: line.split()[2:4] for line in lines}
    assert mounts["/sys"][1].split(",")[0] == mounts["/sys/fs/cgroup"][1].split(",")[0] == "rw"


@pytest.mark.requirement("7.1.3", "7.1.2")
def test_a_container_has_a_single_group_below_the_parent(server: Server) -> None:
    """The cgroup is named after the container and contains its execs. The parent, which kubelet
    made, stays when the pod is removed."""
    tree = next(
        p
        for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
        if (p / "cgroup.procs").exists()
    )
    parent = tree / server.folder.name / "burstable" / "pod1"
    parent.mkdir(parents=True)
    try:
        linux = api.LinuxPodSandboxConfig(cgroup_parent=f"/{parent.relative_to(tree)}")
        pod = server.run_pod(server.pod_config(linux=linux))
        container = server.launch(pod)
        (leaf,) = [path for path in parent.glob("*/") if path.name.endswith(container)]
        assert not list(leaf.glob("*/"))
        group = server.output(
            container, "sh", "-c", "readlink /proc/self/ns/cgroup; readlink /proc/1/ns/cgroup"
        )
        assert len(set(group.split())) == 1
        session = server.runtime.ExecSync.future(
            api.ExecSyncRequest(container_id=container, cmd=["sleep", "3"], timeout=60), timeout=60
        )
        assert wait_until(lambda: len((leaf / "cgroup.procs").read_text().split()) == 2, 30)
        session.result()
        server.remove_pod(pod)
        assert parent.is_dir() and not list(parent.glob("*/"))
    finally:
        server.remove_all()
        parent.rmdir()
        parent.parent.rmdir()
        with contextlib.suppress(OSError):  # the server's, of which others may have groups
            parent.parent.parent.rmdir()


@pytest.mark.requirement("7.2.6")
def test_the_oom_score_is_the_execs_too(server: Server) -> None:
    resources = api.LinuxContainerResources(oom_score_adj=789)
    config = server.container_config(linux=api.LinuxContainerConfig(resources=resources))
    container = server.launch(server.run_pod(), config)
    assert (
        server.output(container, "cat", "/proc/1/oom_score_adj", "/proc/self/oom_score_adj")
        == "789\n789\n"
    )


@pytest.mark.requirement("6.9")
def test_bidirectional_mounts_reach_the_node(server: Server) -> None:
    """A mount that a privileged container makes below a bidirectional mount is visible on the
    node."""
    folder = server.folder / "both"
    folder.mkdir()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    try:
        config = server.pod_config()
        config.linux.security_context.privileged = True
        container_config = secured(server, privileged=True)
        container_config.mounts.add(
            container_path="/both", host_path=str(folder), propagation=api.PROPAGATION_BIDIRECTIONAL
        )
        container = server.launch(server.run_pod(config), container_config)
        server.output(container, "sh", "-c", "mkdir /both/made && mount -t tmpfs made /both/made")
        assert os.path.ismount(folder / "made")
        subprocess.run(["umount", folder / "made"], check=True)
        server.remove_all()
    finally:
        subprocess.run(["umount", folder], check=True)
