"""Tests mounts of a specification as the container sees them: binds and their options, propagation,
creation of destinations, hostile images, masked and read-only paths."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest

from pyrunc.errors import Error, InvalidSpec, KernelError
from pyrunc.kernel import mount as km
from pyrunc.kernel import namespace
from tests.kernel.box import Box, mounts, started_pause

MS_SHARED, MS_REC, MS_BIND = 1 << 20, 16384, 4096


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("content\n")
    return folder


@pytest.mark.parametrize("destination", ["/mnt/a/b", "/tmp", "/new"])
def test_a_folder_can_be_bound(box: Box, data: Path, destination: str) -> None:
    box.bind(data, destination, "rbind", "rprivate")
    assert box.run(f"cat {destination}/file; touch {destination}/made") == "content\n"
    assert (data / "made").exists()


@pytest.mark.parametrize("destination", ["/etc/hosts", "/deep/er/file", "/etc/passwd"])
def test_a_file_can_be_bound(box: Box, data: Path, destination: str) -> None:
    box.bind(data / "file", destination, "bind", "ro")
    assert box.run(f"cat {destination}; touch {destination} 2>&1 || true").splitlines() == [
        "content",
        f"touch: {destination}: Read-only file system",
    ]


def test_created_parents_have_plain_modes(box: Box, data: Path) -> None:
    os.umask(0o077)
    try:
        box.bind(data / "file", "/x/y/file")
        assert box.run("stat -c %a /x /x/y").split() == ["755", "755"]
    finally:
        os.umask(0o022)


def test_binds_have_their_options(box: Box, data: Path) -> None:
    box.bind(data, "/a", "bind", "ro", "nosuid", "nodev", "noexec", "noatime")
    box.bind(data, "/b", "rbind", "rw", "suid", "dev", "strictatime")
    box.bind(data, "/c", "rbind", "ro", "rw", "suid", "dev", "relatime", "nosymfollow")
    mounted = mounts(box.run("cat /proc/self/mountinfo"))
    assert mounted["/a"][0] == "ro,nosuid,nodev,noexec,noatime"
    assert mounted["/b"][0] == "rw"
    assert mounted["/c"][0] == "rw,relatime,nosymfollow"


def test_a_bind_keeps_unnamed_options(box: Box, tmp_path: Path) -> None:
    source = km.open_mount("tmpfs", [], attributes=2 | 8)  # nosuid, noexec
    box.mount_fds["quiet"] = source
    try:
        box.add_mount("/q", "pyrunc:quiet", "rbind", "ro")
        with started_pause(box) as more:
            assert (
                mounts(box.run("cat /proc/self/mountinfo", **more))["/q"][0]
                == "ro,nosuid,noexec,relatime"
            )
    finally:
        os.close(source)


def test_a_container_mounts_the_shared_memory_of_its_pod(box: Box) -> None:
    shm = km.open_mount("tmpfs", [("mode", "1777"), ("size", "1m")], attributes=2 | 4 | 8)
    box.mount_fds["shm"] = shm
    box.config["mounts"] = [m for m in box.config["mounts"] if m["destination"] != "/dev/shm"]
    box.add_mount("/dev/shm", "pyrunc:shm", "rbind", "rw")
    try:
        with started_pause(box) as more:
            box.run("echo hi > /dev/shm/word", **more)
            assert box.run("cat /dev/shm/word; stat -c %a /dev/shm", **more).split() == [
                "hi",
                "1777",
            ]
    finally:
        os.close(shm)


def test_read_only_is_not_recursive_and_rro_is(box: Box, data: Path) -> None:
    in_namespace(lambda: _read_only(box, data))


def _read_only(box: Box, data: Path) -> None:
    km.mount("tmpfs", data / "sub", "tmpfs")
    box.bind(data, "/ro", "rbind", "ro")
    box.bind(data, "/rro", "rbind", "rro")
    text = box.run("touch /ro/x; touch /ro/sub/x && echo ok; touch /rro/x; touch /rro/sub/y; true")
    assert text.splitlines() == [
        "touch: /ro/x: Read-only file system",
        "ok",
        "touch: /rro/x: Read-only file system",
        "touch: /rro/sub/y: Read-only file system",
    ]


def test_bind_without_r_shows_only_the_top(box: Box, data: Path) -> None:
    def check() -> None:
        km.mount("tmpfs", data / "sub", "tmpfs")
        (data / "sub/inner").touch()
        box.bind(data, "/one", "bind")
        box.bind(data, "/all", "rbind")
        assert box.run("ls /one/sub; ls /all/sub") == "inner\n"

    in_namespace(check)


@pytest.mark.parametrize(
    ("option", "root", "inward", "outward"),
    [
        ("rprivate", "", False, False),
        ("rslave", "rslave", True, False),
        ("rslave", "", True, False),
        ("rslave", "rprivate", True, False),
        ("rshared", "rshared", True, True),
        ("rshared", "", True, False),
    ],
)
def test_a_mount_has_its_propagation(
    box: Box, data: Path, option: str, root: str, inward: bool, outward: bool
) -> None:
    def check() -> None:
        km.mount("tmpfs", data, "tmpfs")
        km.mount(None, data, None, MS_SHARED | MS_REC)
        for name in ("in", "out"):
            (data / name).mkdir()
        box.bind(data, "/vol", "rbind", option)
        box.linux["rootfsPropagation"] = root
        with box.running() as (created, request):
            km.mount("tmpfs", data / "in", "tmpfs")
            (data / "in/seen").touch()
            text = box.execute(
                created, request, "mount -t tmpfs t /vol/out; touch /vol/out/seen; ls /vol/in"
            )
            assert (text == "seen\n") is inward
            assert (data / "out/seen").exists() is outward

    in_namespace(check)


def test_no_mount_of_the_container_reaches_the_host(box: Box, data: Path) -> None:
    def check() -> None:
        km.mount("tmpfs", data, "tmpfs")
        km.mount(None, data, None, MS_SHARED | MS_REC)
        box.bind(data, "/vol")
        with box.running() as (created, request):
            box.execute(created, request, "mkdir /vol/m; mount -t tmpfs t /vol/m; touch /vol/m/x")
            assert (data / "m").is_dir()
            assert not (data / "m/x").exists()

    in_namespace(check)


@pytest.mark.parametrize(
    "word",
    ["shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable"],
)
def test_the_root_has_its_propagation(box: Box, word: str) -> None:
    box.linux["rootfsPropagation"] = word
    fields = mounts(box.run("cat /proc/self/mountinfo"))["/"][2]
    assert ("shared:" in fields) == ("shared" in word)
    assert ("unbindable" in fields) == ("unbindable" in word)


def test_destinations_may_be_nested_and_repeated(box: Box, data: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/word").write_text("other\n")
    box.bind(data, "/v")
    box.bind(tmp_path / "other", "/v/sub")
    box.bind(data, "/twice")
    box.bind(tmp_path / "other", "/twice")
    assert box.run("cat /v/file /v/sub/word /twice/word") == "content\nother\nother\n"


def test_symlinks_stay_inside(box: Box, data: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (box.image / "abs").symlink_to(canary)
    (box.image / "rel").symlink_to("../../../../../../../.." + str(canary))
    (box.image / "up").symlink_to("..")
    (box.image / "var/run").symlink_to("/gone/run")
    box.bind(data / "file", "/abs/made")
    box.bind(data / "file", "/rel/made2")
    box.bind(data / "file", "/up/up/../made3")
    box.bind(data, "/var/run/deep")
    box.bind(data / "file", "/../../made4")
    text = box.run(f"cat {canary}/made {canary}/made2 /made3 /made4 /gone/run/deep/file")
    assert text == "content\n" * 5
    assert list(canary.iterdir()) == []


def test_a_swapped_folder_never_leads_outside(box: Box, data: Path, tmp_path: Path) -> None:
    """CVE-2021-30465, CVE-2024-45310: another process swaps a folder of a shared volume with a
    symlink while mounts are made. Nothing is made in the folder to which the link leads."""
    canary, volume = tmp_path / "canary", tmp_path / "volume"
    canary.mkdir()
    (volume / "d").mkdir(parents=True)
    (volume / "link").symlink_to("/" + "../" * 12 + str(canary).lstrip("/"))
    box.bind(volume, "/vol")
    box.bind(data, "/vol/d/x/y")
    swapper = os.fork()
    if not swapper:
        libc = ctypes.CDLL(None)
        one, two = os.fsencode(volume / "d"), os.fsencode(volume / "link")
        while os.getppid() != 1:
            libc.renameat2(-100, one, -100, two, 2)
        os._exit(0)
    try:
        good = 0
        for _ in range(60):
            try:
                good += box.outcome("true")[0] == 0
            except KernelError:
                pass
            assert list(canary.iterdir()) == []
            _empty(volume)
        assert good
    finally:
        os.kill(swapper, 9)
        os.waitpid(swapper, 0)


def _empty(volume: Path) -> None:
    """Remove the directories that a container made in the volume."""
    # A swap may have renamed `d` to `link`.
    for path in ("d/x/y", "d/x", "link/x/y", "link/x"):
        try:
            (volume / path).rmdir()
        except OSError:
            pass


@pytest.mark.parametrize("target", ["/tmp", "tmp", "/", "/nowhere"])
@pytest.mark.parametrize("name", ["proc", "sys"])
def test_proc_and_sys_need_ordinary_directories(box: Box, name: str, target: str) -> None:
    (box.image / name).rmdir()
    (box.image / name).symlink_to(target)
    with pytest.raises(KernelError, match=f"/{name} must be mounted on ordinary directory"):
        box.run("true")


@pytest.mark.parametrize(
    "destination", ["/proc/self", "/proc/sys/kernel", "/proc/1/attr", "/proc/../proc/self"]
)
def test_nothing_is_mounted_inside_proc(box: Box, data: Path, destination: str) -> None:
    box.bind(data, destination)
    with pytest.raises(InvalidSpec, match="cannot be mounted because it is inside /proc"):
        box.run("true")


def test_nothing_but_proc_is_mounted_on_proc(box: Box) -> None:
    box.add_mount("/proc", "tmpfs", kind="tmpfs")
    with pytest.raises(InvalidSpec, match="not of type proc"):
        box.run("true")


def test_dev_as_a_symlink_of_the_image_is_not_followed(box: Box, tmp_path: Path) -> None:
    """CVE-2026-41579, CVE-2026-47766: nodes and links must not be made at the target of the image's
    /dev on the host."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "ptmx").write_text("mine")
    box.config["mounts"] = [
        m for m in box.config["mounts"] if not m["destination"].startswith("/dev")
    ]
    (box.image / "dev").rmdir()
    (box.image / "dev").symlink_to(canary)
    try:
        box.run("true")
    except Error:
        pass
    assert {p.name: p.read_text() for p in canary.iterdir()} == {"ptmx": "mine"}
    assert not (canary / "ptmx").is_symlink()


def test_a_tmpfs_has_its_options(box: Box) -> None:
    (box.image / "run").chmod(0o750)
    box.add_mount("/run", "tmpfs", "nosuid", "size=64k", kind="tmpfs")
    box.add_mount("/ro", "tmpfs", "ro", "mode=700", kind="tmpfs")
    box.add_mount("/ro/inside", "tmpfs", kind="tmpfs")
    text = box.run(
        "stat -c %a /run /ro; touch /run/x; touch /ro/x; touch /ro/inside/x && echo fine; true"
    )
    assert text.splitlines() == ["750", "700", "touch: /ro/x: Read-only file system", "fine"]


def test_the_root_can_be_read_only(box: Box, data: Path) -> None:
    box.config["root"]["readonly"] = True
    box.bind(data, "/w")
    text = box.run("touch /x; touch /dev/x && echo dev; touch /w/x && echo volume; true")
    assert text.splitlines() == ["touch: /x: Read-only file system", "dev", "volume"]


def test_masked_paths_are_empty(box: Box) -> None:
    (box.image / "secret").mkdir()
    (box.image / "secret/key").write_text("k")
    (box.image / "secret2").mkdir()
    (box.image / "word").write_text("w")
    box.linux["maskedPaths"] = [
        "/secret",
        "/secret",
        "/secret2",
        "/word",
        "/missing",
        "/proc/keys",
        "/word/below",
    ]
    text = box.run(
        "ls -a /secret /secret2; cat /word; touch /secret/x; umount /secret; echo $?; stat -c "
        "%t:%T /proc/keys"
    )
    assert text.splitlines() == [
        "/secret:",
        ".",
        "..",
        "",
        "/secret2:",
        ".",
        "..",
        "touch: /secret/x: Read-only file system",
        "0",
        "1:3",
    ]  # fmt: skip  (umount works: this container kept CAP_SYS_ADMIN)


def test_readonly_paths_cannot_be_written_to(box: Box) -> None:
    (box.image / "r/below").mkdir(parents=True)
    (box.image / "broken").symlink_to("/nowhere")
    box.linux["readonlyPaths"] = ["/r", "/broken", "/missing/x", "/proc/sys"]
    text = box.run(
        "touch /r/x; touch /r/below/x; echo 1 > /proc/sys/kernel/hostname; touch /y && echo y"
    )
    assert text.splitlines() == [
        "touch: /r/x: Read-only file system",
        "touch: /r/below/x: Read-only file system",
        "sh: can't create /proc/sys/kernel/hostname: Read-only file system",
        "y",
    ]


@pytest.mark.parametrize("how", ["file", "symlink", "other device", "missing"])
def test_a_hostile_null_device_is_refused(box: Box, tmp_path: Path, how: str) -> None:
    """CVE-2025-31133: a masked file must not become a bind of the image's own /dev/null."""
    dev = tmp_path / "dev"
    dev.mkdir()
    (tmp_path / "target").write_text("attacker")
    if how == "file":
        (dev / "null").write_text("x")
    elif how == "symlink":
        (dev / "null").symlink_to("/etc/passwd")
    elif how == "other device":
        os.mknod(dev / "null", 0o20666, os.makedev(1, 5))
    box.config["mounts"] = [
        m for m in box.config["mounts"] if not m["destination"].startswith("/dev")
    ]
    box.bind(dev, "/dev")
    box.linux["maskedPaths"] = ["/etc/passwd"]
    with pytest.raises(KernelError, match=r"/dev/null|mask"):
        box.run("true")


def test_a_missing_source_is_an_error(box: Box, tmp_path: Path) -> None:
    box.bind(tmp_path / "none", "/x")
    with pytest.raises(KernelError, match=r"bind '.*none' on '/x': ENOENT"):
        box.run("true")


def test_a_folder_cannot_be_bound_on_a_file(box: Box, data: Path) -> None:
    box.bind(data, "/etc/passwd")
    with pytest.raises(KernelError, match=r"bind .* on '/etc/passwd'.*: ENOTDIR"):
        box.run("true")


def test_unknown_filesystems_and_options_are_errors(box: Box) -> None:
    box.add_mount("/x", "none", kind="nosuchfs")
    with pytest.raises(KernelError, match=r"mount 'nosuchfs' on '/x': ENODEV"):
        box.run("true")
    box.config["mounts"][-1] = {"destination": "/x", "type": "tmpfs", "options": ["nonsense=1"]}
    with pytest.raises(KernelError, match=r"mount 'tmpfs' on '/x' .*: EINVAL"):
        box.run("true")


def test_listed_devices_are_created(box: Box) -> None:
    box.linux["devices"] = [
        {
            "path": "/dev/fuse",
            "type": "c",
            "major": 10,
            "minor": 229,
            "fileMode": 0o600,
            "uid": 7,
            "gid": 8,
        },
        {"path": "/dev/deep/er/blk", "type": "b", "major": 7, "minor": 0},
        {"path": "/run/pipe", "type": "p", "major": 9, "minor": 9, "fileMode": 0o10640},
        {"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "fileMode": 0o666},
        {"path": "/dev/ptmx", "type": "c", "major": 5, "minor": 2},
        {"path": "/dev/tty", "type": "c", "major": 5, "minor": 0},
    ]
    box.linux["resources"] = {}
    text = box.run(
        "stat -c '%n %F %t:%T %a %u:%g' /dev/fuse /dev/deep/er/blk /run/pipe /dev/null; readlink "
        "/dev/ptmx"
    )
    assert text.splitlines() == [
        "/dev/fuse character special file a:e5 600 7:8",
        "/dev/deep/er/blk block special file 7:0 666 0:0",
        "/run/pipe fifo 0:0 640 0:0",
        "/dev/null character special file 1:3 666 0:0",
        "pts/ptmx",
    ]


def test_an_existing_file_is_not_a_device(box: Box) -> None:
    (box.image / "opt").mkdir()
    (box.image / "opt/dev").write_text("")
    box.linux["devices"] = [{"path": "/opt/dev", "type": "c", "major": 1, "minor": 3}]
    with pytest.raises(KernelError, match="/opt/dev exists and is not the configured device"):
        box.run("true")


def in_namespace(check: object) -> None:
    """Run the check in a child with its own mount namespace, so that a test's mounts stay
    in the test."""
    pid = os.fork()
    if not pid:
        try:
            namespace.unshare(0x20000)
            km.mount(None, "/", None, MS_REC | (1 << 18))
            check()  # type: ignore[operator]
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_source_in_another_mount_namespace_is_refused(box: Box, tmp_path: Path) -> None:
    """A source that is a link to a folder below /proc/PID/root, in another mount namespace, is
    refused, because the kernel does not bind it. The folder of the same path on the host is not
    mounted instead."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("of the host\n")
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            namespace.unshare(0x20000)
            km.mount(None, "/", None, MS_REC | (1 << 18))
            km.mount("tmpfs", str(data), "tmpfs")
            os.write(writing, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1)
        (tmp_path / "link").symlink_to(f"/proc/{pid}/root{data}")
        box.bind(tmp_path / "link", "/data")
        with pytest.raises(KernelError, match="/link' on '/data': EINVAL"):
            box.run("cat /data/file")
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("layers", [1, 2, 40])
def test_an_overlay_can_be_a_volume(box: Box, tmp_path: Path, layers: int) -> None:
    lower = []
    for number in range(layers):
        layer = tmp_path / f"a-layer-with-a-long-name-{number}"
        layer.mkdir()
        (layer / f"f{number}").touch()
        (layer / "top").write_text(str(number))
        lower.append(str(layer))
    box.add_mount(
        "/image", "overlay", f"lowerdir={':'.join(lower)}", "ro", "nosuid", kind="overlay"
    )
    text = box.run("ls /image | wc -l; cat /image/top; touch /image/x 2>&1; true")
    assert text.split("touch")[0].split() == [str(layers + 1), "0"]
    assert "Read-only file system" in text
    assert "nosuid" in mounts(box.run("cat /proc/self/mountinfo"))["/image"][0]


def test_a_writable_overlay_can_be_a_volume(box: Box, tmp_path: Path) -> None:
    for name in ("l:1", "l2", "u", "w"):
        (tmp_path / name).mkdir()
    (tmp_path / "l:1/word").write_text("x")
    options = (
        f"lowerdir={tmp_path}/l\\:1:{tmp_path}/l2",
        f"upperdir={tmp_path}/u",
        f"workdir={tmp_path}/w",
    )
    box.add_mount("/o", "overlay", *options, kind="overlay")
    assert box.run("cat /o/word; touch /o/made") == "x"
    assert (tmp_path / "u/made").exists()


ODD = ("a:b", "a\\:b", "a\\b", "a\\\\", "a,b", "b" * 250)


@pytest.mark.parametrize("name", ODD, ids=map(str, range(len(ODD))))
def test_an_overlay_volume_may_have_folders_with_any_name(
    box: Box, tmp_path: Path, name: str
) -> None:
    folders = {part: tmp_path / part / name for part in ("one", "two", "u", "w")}
    for part, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / part).touch()
    (folders["w"] / "w").unlink()
    escaped = {part: str(folder).replace("\\", "\\\\") for part, folder in folders.items()}
    writable = (f"upperdir={escaped['u']}", f"workdir={escaped['w']}")
    box.add_mount(
        "/list", "overlay", *(f"lowerdir+={folders[n]}" for n in ("one", "two")), kind="overlay"
    )
    joined = ":".join(escaped[n].replace(":", "\\:") for n in ("one", "two"))
    box.add_mount("/joined", "overlay", f"lowerdir={joined}", *writable, kind="overlay")
    assert box.run("ls /list; touch /joined/made; ls /joined").split() == [
        "one",
        "two",
        "made",
        "one",
        "two",
        "u",
    ]
    assert (folders["u"] / "made").exists()


def test_a_tmpfs_copies_the_covered_folder(box: Box) -> None:
    home = box.image / "home/web"
    (home / "deep/er").mkdir(parents=True)
    (home / "deep/er/file").write_text("x" * 100_000)
    (home / "link").symlink_to("/etc/passwd")
    os.mkfifo(home / "pipe", 0o640)
    os.chown(home / "deep/er/file", 5, 6)
    (home / "deep/er/file").chmod(0o4755)
    os.chown(home, 1000, 1000)
    box.add_mount("/home/web", "tmpfs", "tmpcopyup", "nodev", kind="tmpfs")
    box.add_mount("/run", "tmpfs", "tmpcopyup", "ro", kind="tmpfs")
    box.add_mount("/new", "tmpfs", "tmpcopyup", kind="tmpfs")
    script = (
        "cd /home/web; stat -c '%u:%g %a %s' deep/er/file; stat -c %F pipe; readlink link; stat "
        "-c %u .; touch made;"
        "touch /run/x 2>&1; ls -A /new; grep -c ' /home/web ' /proc/self/mountinfo"
    )
    assert box.run(script + "; true").splitlines() == [
        "5:6 4755 100000",
        "fifo",
        "/etc/passwd",
        "1000",
        "touch: /run/x: Read-only file system",
        "1",
    ]
    assert not (home / "made").exists()


def test_the_copy_of_a_covered_folder_keeps_hard_links_and_the_mode_of_its_mount(box: Box) -> None:
    home = box.image / "home/web"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o750)
    (home / "one").write_text("x")
    os.link(home / "one", home / "two")
    box.add_mount("/home/web", "tmpfs", "tmpcopyup", "mode=1701", kind="tmpfs")
    output = box.run("cd /home/web; stat -c %h one two; stat -c %a .")
    assert output.split() == ["2", "2", "1701"]


def test_a_tmpfs_that_is_too_small_for_its_copy_is_an_error(box: Box) -> None:
    (box.image / "run/big").write_bytes(os.urandom(1 << 20))
    box.add_mount("/run", "tmpfs", "tmpcopyup", "size=64k", kind="tmpfs")
    with pytest.raises(KernelError, match="tmpcopyup '/run': ENOSPC"):
        box.run("true")


def test_the_hosts_root_can_be_a_volume(box: Box, tmp_path: Path) -> None:
    """A volume of the host's `/` shows all of the host and nothing of the container, although the
    container's root is attached on top of `/` during the mount."""
    link = tmp_path / "to-root"
    link.symlink_to("/")
    box.bind(Path("/"), "/host", "rbind", "rslave", "ro")
    box.bind(Path("/"), "/host2", "rbind", "rprivate", "ro")
    box.bind(link, "/host3", "rbind", "rprivate")
    names = set(os.listdir("/"))
    for place in ("/host", "/host2", "/host3"):
        assert set(box.run(f"ls -A {place}").split()) == names
        assert box.run(f"cat {place}/proc/sys/kernel/hostname {place}/etc/hostname").split()[0]
    assert box.run("grep -c ' / /host' /proc/self/mountinfo")


def test_mounts_are_listed_in_the_order_of_the_configuration(box: Box, data: Path) -> None:
    box.bind(data, "/a", "rbind", "rprivate")
    box.add_mount("/b", "tmpfs", kind="tmpfs")
    box.bind(data, "/c", "bind", "ro")
    places = [line.split()[4] for line in box.run("cat /proc/self/mountinfo").splitlines()]
    order = ["/proc", "/dev", "/sys", "/a", "/b", "/c"]
    assert [place for place in places if place in order] == order
