"""Tests verbs about images: pull, push, load, save, tag, rmi, prune, history, login; with a
registry in the server's network namespace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.cli.connection.client import Client, ServerError
from cri_server.cli.images import credentials
from cri_server.images.archives import build
from cri_server.images.formats.platforms import host_platform
from cri_server.rpc import private
from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.kernel.namespace import setns
from tests.cri.client_verbs import (
    Result,
    call,
    cli,
    ended,
    local_command_line,
    ok,
    on_terminal,
    started,
)
from tests.cri.server_harness import IMAGE, REPOSITORY, Server
from tests.support.processes import wait_until
from tests.support.registry import Registry


@pytest.fixture(scope="module")
def registry(module_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Provide a registry in the server's network namespace."""
    registries: list[Registry] = []

    def make() -> None:
        namespace = os.open(f"/proc/{module_server.pid}/ns/net", os.O_RDONLY)
        try:
            setns(namespace, CLONE_NEWNET)
        finally:
            os.close(namespace)
        registries.append(
            Registry(tmp_path_factory.mktemp("registry"), auth=("bearer", "user", "secret"))
        )

    # Only this thread enters the namespace.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with registries[0] as running:
        yield running


@pytest.fixture(autouse=True)
def logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the test use its own login file; return the file's path."""
    path = tmp_path / "logins" / "auth.json"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(path))
    return path


@pytest.fixture(autouse=True)
def only_the_first_image(module_server: Server) -> Iterator[None]:
    yield
    server = module_server
    server.remove_all()
    (first,) = ok(server, "images", "-q", IMAGE).lines
    for name in ok(server, "images", "--format", "{{json .repoTags}}").lines:
        for tag in json.loads(name):
            if tag != IMAGE:
                ok(server, "rmi", tag)
    for identifier in ok(server, "images", "-q").lines:
        if identifier != first:
            ok(server, "rmi", identifier)


def small(name: str, **config: object) -> bytes:
    """Return a docker-archive of an image with one file."""
    return build.docker_archive(
        {name: build.image([build.layer({"file": b"x" * 1000})], dict(config))}
    )


def test_tag_adds_and_rmi_removes_a_name(server: Server) -> None:
    ok(server, "tag", IMAGE, "registry.test/other:2", "short")
    names = set(
        ok(server, "inspecti", "--format", "{{json .status.repoTags}}", IMAGE)
        .out.strip("[]\n")
        .replace('"', "")
        .split(", ")
    )
    assert names == {IMAGE, "registry.test/other:2", "docker.io/library/short:latest"}
    ok(server, "rmi", "short", "registry.test/other:2")
    assert json.loads(
        ok(server, "inspecti", "--format", "{{json .status.repoTags}}", IMAGE).out
    ) == [IMAGE]
    assert call(server, "tag", "no/such:image", "x").error == "no such image: 'no/such:image'"
    assert "malformed reference" in call(server, "tag", IMAGE, "UPPER").error
    assert call(server, "rmi", "no/such:image").error == "no such image: 'no/such:image'"
    pod = server.run_pod()
    server.launch(pod)
    assert "is in use by container" in call(server, "rmi", IMAGE).error


def test_a_saved_image_can_be_loaded(server: Server, tmp_path: Path) -> None:
    ok(server, "tag", IMAGE, "registry.test/other:2")
    ok(server, "save", "-o", str(tmp_path / "images.tar"), IMAGE, "registry.test/other:2")
    assert os.listdir(tmp_path) == ["images.tar"], "no temporary file remains"
    with tarfile.open(tmp_path / "images.tar") as archive:
        manifest = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        assert manifest[0]["RepoTags"] == [IMAGE, "registry.test/other:2"]
        assert {manifest[0]["Config"], *manifest[0]["Layers"], "oci-layout", "index.json"} <= set(
            archive.getnames()
        )
    (identifier,) = ok(server, "images", "-q").lines
    ok(server, "rmi", IMAGE, "registry.test/other:2")
    assert ok(server, "images", "-q").lines == []
    done = cli(server, "load", "-", stdin=(tmp_path / "images.tar").read_bytes())
    assert done.stdout.decode().split()[0] == identifier
    assert (
        ok(server, "images", "-q", IMAGE).lines
        == [identifier]
        == ok(server, "images", "-q", "registry.test/other").lines
    )
    assert call(server, "save", "no/such:image").error == "no such image: 'no/such:image'"


def test_other_tools_read_saved_archives(server: Server, tmp_path: Path) -> None:
    saved = cli(server, "save", IMAGE).stdout
    (tmp_path / "image.tar").write_bytes(saved)
    for kind in ("docker-archive", "oci-archive"):
        done = subprocess.run(
            ["skopeo", "inspect", f"{kind}:{tmp_path}/image.tar"], capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0 and json.loads(done.stdout)["Architecture"], (kind, done.stderr)


def test_load_reads_an_archive_from_stdin(server: Server) -> None:
    done = cli(server, "load", stdin=small("registry.test/small:1"))
    assert done.stdout.decode().split()[1] == "registry.test/small:1"
    error = cli(server, "load", "-", stdin=b"no archive" * 100_000, code=1).stderr.decode()
    assert error.startswith("pyrunc-cri: stdin: ") and error.count("\n") == 1
    assert b"stdin: " in cli(server, "load", "-", stdin=b"", code=1).stderr


def test_pull_and_push_use_stored_logins(server: Server, registry: Registry, logins: Path) -> None:
    name = f"{registry.host}/team/busybox:1"
    refused = call(server, "push", IMAGE, name).error
    assert "401" in refused
    wrong = call(server, "login", "-u", "user", "--password-stdin", registry.host, stdin="wrong\n")
    assert "401" in wrong.error and not logins.exists()
    result = ok(server, "login", "-u", "user", "--password-stdin", registry.host, stdin="secret\n")
    assert (
        result.out == f"logged in at {registry.host}; stored in {logins}\n"
        and logins.stat().st_mode & 0o777 == 0o600
    )
    digest = ok(server, "push", IMAGE, name).out.strip()
    assert digest.startswith("sha256:") and ("team/busybox", "1") in registry.manifests
    (identifier,) = ok(server, "images", "-q", IMAGE).lines
    ok(server, "rmi", IMAGE)
    assert ok(server, "pull", name).lines == [identifier]
    ok(server, "tag", name, IMAGE)
    before = len(registry.requests)
    ok(server, "push", IMAGE, name)
    assert not [r for r in registry.requests[before:] if r.method == "POST"], (
        "layers in the registry are not sent again"
    )
    ok(server, "logout", registry.host)
    assert call(server, "logout", registry.host).error == f"not logged in at {registry.host}"
    assert "401" in call(server, "pull", f"{registry.host}/team/other:1").error
    assert ok(server, "pull", "--creds", "user:secret", name).lines == [identifier]


def test_pull_accepts_another_platform(server: Server, registry: Registry) -> None:
    """After `pull --platform` the name refers to that platform's image until the next pull without
    the option."""
    host, foreign = (
        build.image([build.layer({"file": text.encode()})], {"Cmd": ["/file"]})
        for text in ("host's", "foreign")
    )
    own = host_platform()
    index = {(own.os, own.architecture, ""): host, ("linux", "s390x", ""): foreign}
    registry.push_index("team/several:1", index)
    registry.push("team/single:1", host)
    name, single = (f"{registry.host}/team/{image}:1" for image in ("several", "single"))

    def pull(*arguments: str) -> Result:
        return ok(server, "pull", "--creds", "user:secret", *arguments)

    (own_id,) = pull(name).lines
    pulled = pull("--platform", "linux/s390x", name)
    assert (
        pulled.err.strip()
        == "pyrunc-cri: this processor runs images for linux/s390x only with binfmt_misc"
    )
    (foreign_id,) = pulled.lines
    assert foreign_id != own_id and ok(server, "images", "-q", name).lines == [foreign_id]
    assert pull("--platform", str(own), name).lines == [own_id]
    assert ok(server, "images", "-q", name).lines == [own_id]
    pull("--platform", "linux/s390x", name)
    assert pull(name).lines == [own_id]
    assert pull("--platform", str(own), single).lines == [own_id]
    for reference, there in ((name, f"{own}, linux/s390x"), (single, str(own))):
        words = ("--creds", "user:secret", "--platform", "linux/riscv64", reference)
        error = call(server, "pull", *words).error
        assert f"no image for linux/riscv64; available: {there}" in error
    ok(server, "rmi", name, single)


@pytest.mark.parametrize(
    "platform", ["", "linux", "linux/", "linux/a/b/c", "linux/a b", "windows/amd64"]
)
def test_an_invalid_platform_is_refused(server: Server, platform: str) -> None:
    refused = call(server, "pull", "--platform", platform, "registry.test/app:1")
    assert refused.code == 2 and f"platform '{platform}'" in refused.err


def test_a_pull_shows_its_progress_on_a_terminal_only(server: Server, registry: Registry) -> None:
    name = f"{registry.host}/team/progress:1"
    ok(server, "push", "--creds", "user:secret", IMAGE, name)
    done = on_terminal(server, "pull", "--creds", "user:secret", name)
    assert done.returncode == 0 and f"pulling {name}" in done.stdout, done
    assert done.stdout.split("\x1b[K")[-1].startswith("sha256:"), "the line is gone at the end"
    assert ok(server, "pull", "--creds", "user:secret", name).err == ""


def test_a_load_shows_its_progress_on_a_terminal_only(server: Server, tmp_path: Path) -> None:
    archive = tmp_path / "small.tar"
    archive.write_bytes(small("registry.test/progress:1"))
    done = on_terminal(server, "load", str(archive))
    assert done.returncode == 0 and "loading small.tar" in done.stdout, done
    assert "unpacking" in done.stdout, "the server unpacks after it has read the archive"
    assert done.stdout.split("\x1b[K")[-1].startswith("sha256:"), "the line is gone at the end"
    assert ok(server, "load", str(archive)).err == ""
    ok(server, "rmi", "registry.test/progress:1")


def test_login_files_are_read_in_the_documented_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGISTRY_AUTH_FILE")
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".docker").mkdir()
    auths = {
        "https://index.docker.io/v1/": {"auth": "dTpw"},
        "host:5000/team": {"auth": "dDpw"},
        "host:5000": {"identitytoken": "x"},
    }
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({"auths": auths}))
    for reference, user in (
        ("busybox", "u"),
        ("host:5000/team/image", "t"),
        ("host:5000/other", ""),
        ("elsewhere.org/x", None),
    ):
        login = credentials.find(reference)
        assert (login.username if login else None) == user, reference
    (tmp_path / ".docker" / "config.json").write_text("{")
    assert "config.json" in call("unix:///nowhere", "pull", "busybox").error


def test_history_lists_the_steps_of_an_image(server: Server) -> None:
    archive = server.folder / "history.tar"
    archive.write_bytes(small("registry.test/small:1"))
    ok(server, "load", str(archive))
    assert ok(server, "history", "registry.test/small:1").lines[0].split()[:1] == ["CREATED"]
    info = ok(server, "inspecti", IMAGE).json["info"]
    assert info["imageSpec"]["rootfs"]["diff_ids"] and info["layers"][0]["size"] > 0


def test_prune_removes_unused_images(server: Server) -> None:
    archive = server.folder / "other.tar"
    archive.write_bytes(small("registry.test/unused:1"))
    ok(server, "load", str(archive))
    ended = server.run_pod(server.pod_config("ended"))
    server.launch(ended)
    server.stop_pod(ended)
    kubelets = server.run_pod(server.pod_config("node", labels={"io.kubernetes.pod.uid": "u"}))
    server.stop_pod(kubelets)
    lives = server.run_pod(server.pod_config("lives"))
    server.wait_exit(server.launch(lives, server.container_config(["true"])))
    assert "remove all 2" in call(server, "prune").error
    assert ok(server, "prune", "-f").lines[:2] == ["pod default/ended", "container c"]
    assert {p.metadata.name for p in server.pods()} == {"node", "lives"}
    server.launch(lives, server.container_config())
    assert "image registry.test/unused:1" in ok(server, "prune", "-a", "-f", "--images").lines
    assert ok(server, "images", "-q", IMAGE).lines, "a container is of it"
    assert ok(server, "rmi", "--prune", "-f").lines == []


def test_image_prune_removes_images_only(server: Server) -> None:
    """Without `-a` only images without a name are removed, as in docker and podman. Pods and
    containers stay, even if they have ended."""
    archive = server.folder / "other.tar"
    for name in ("registry.test/renamed:1", "registry.test/unused:1"):
        archive.write_bytes(small(name, Labels={"for": name}))
        ok(server, "load", str(archive))
    archive.write_bytes(small("registry.test/renamed:1"))
    ok(server, "load", str(archive))  # the earlier image has lost this name
    ended = server.run_pod(server.pod_config("ended"))
    used = server.launch(ended)
    server.stop_pod(ended)
    images = ok(server, "images", "-o", "json").json["images"]
    ((nameless,),) = [i["repoDigests"] for i in images if not i["repoTags"]]
    assert f"remove image {nameless}: needs confirmation" in call(server, "image", "prune").error
    lines = ok(server, "image", "prune", "-f").lines
    assert lines[0] == f"image {nameless}" and lines[1].startswith("freed ") and len(lines) == 2
    lines = ok(server, "image", "prune", "-a", "-f").lines
    assert sorted(lines[:-1]) == ["image registry.test/renamed:1", "image registry.test/unused:1"]
    assert ok(server, "images", "-q", IMAGE).lines, "a container is of it"
    assert [p.id for p in server.pods()] == [ended] and [c.id for c in server.containers()] == [
        used
    ]


def test_an_interrupted_load_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """The client's pipe and the part of the archive that the server has received are removed."""
    content = small("registry.test/small:1")
    command = local_command_line(server, "load")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:  # fmt: skip
        timer = threading.Timer(60, process.kill)
        timer.start()
        assert process.stdin is not None
        process.stdin.write(content[: len(content) // 2])
        process.stdin.flush()
        assert wait_until(lambda: bool(list(tmp_path.glob("pyrunc-load-*/archive"))), 30)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        timer.cancel()
    assert not list(tmp_path.glob("pyrunc-load-*"))
    (ingest,) = server.root.rglob("ingest")
    assert wait_until(lambda: not list(ingest.iterdir()), 30)
    assert ok(server, "images", "-q", "registry.test/small").lines == []
    archive = tmp_path / "small.tar"
    archive.write_bytes(content)
    ok(server, "load", str(archive))


def test_an_interrupted_save_leaves_no_file(server: Server, tmp_path: Path) -> None:
    # A pipe that is not read keeps `save` in the middle of the archive.
    os.mkfifo(tmp_path / "pipe")
    arguments = ("save", "-o", str(tmp_path / "pipe"), IMAGE)
    with started(server, *arguments) as process:
        reading = os.open(tmp_path / "pipe", os.O_RDONLY)
        try:
            assert os.read(reading, 1)
            process.send_signal(signal.SIGINT)
            assert ended(process)[1] == 128 + signal.SIGINT
        finally:
            os.close(reading)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        (private.SaveImages.call, {"images": "x"}),
        (private.SaveImages.call, {"images": []}),
        (private.TagImage.call, {"source": IMAGE}),
        (private.PullImage.call, {"image": 5}),
        (private.PullImage.call, {"image": "x", "auth": ["a"]}),
        (private.PushImage.call, {"image": IMAGE, "target": "UPPER"}),
        (private.CheckLogin.call, {"registry": "a b"}),
    ],
)
def test_an_admin_call_with_invalid_fields_is_an_invalid_argument(
    server: Server, name: str, request_: dict[str, object]
) -> None:
    with (
        Client(f"unix://{server.socket}") as client,
        pytest.raises(ServerError, match=r"must be|malformed|missing|, not "),
    ):
        list(client._stream(private.path(name), private.encode(request_), bytes))
