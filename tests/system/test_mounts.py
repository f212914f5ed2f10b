"""Tests mounts of a configuration as the container's mountinfo shows them: options, propagation,
mount points, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Result, Runtime

# option -> options that mountinfo adds to, and drops from, those of a plain bind
OPTIONS: dict[str, tuple[set[str], set[str]]] = {
    "ro": ({"ro"}, {"rw"}), "nosuid": ({"nosuid"}, set()), "nodev": ({"nodev"}, set()),
    "noexec": ({"noexec"}, set()),
    "nosymfollow": ({"nosymfollow"}, set()), "noatime": ({"noatime"}, {"relatime"}),
    "nodiratime": ({"nodiratime"}, set()),
    "strictatime": (set(), {"relatime"}), "relatime": ({"relatime"}, {"noatime"}), "rw": (set(),
    set()),
    "rro": ({"ro"}, {"rw"}), "rnosuid": ({"nosuid"}, set()), "rnodev": ({"nodev"}, set()),
    "rnoexec": ({"noexec"}, set()),
    "rnosymfollow": ({"nosymfollow"}, set()), "rnoatime": ({"noatime"}, {"relatime"}),
    "rstrictatime": (set(), {"relatime"}),
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("content\n")
    return folder


def run(runtime: Runtime, script: str, *mounts: dict[str, Any], **linux: Any) -> Result:
    def change(config: dict[str, Any]) -> None:
        config["mounts"] += mounts
        config["root"]["readonly"] = False

    return runtime.run("sh", "-c", script, change=change, **linux)


def bind(source: Path, destination: str, *options: str) -> dict[str, Any]:
    return {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": ["rbind", *options],
    }


def parse_mountinfo(mountinfo: str) -> dict[str, tuple[set[str], str]]:
    """Return a dict: mount point -> (options, propagation fields)."""
    mounted = {}
    for line in mountinfo.splitlines():
        fields = line.partition(" - ")[0].split()
        mounted[fields[4]] = set(fields[5].split(",")), " ".join(fields[6:])
    return mounted


def test_binds_have_their_options(runtime: Runtime, data: Path) -> None:
    mounts = [bind(data, "/tmp/plain", "rprivate")]
    mounts += [bind(data, f"/tmp/{option}", "rprivate", option) for option in OPTIONS]
    mounted = parse_mountinfo(run(runtime, "cat /proc/self/mountinfo", *mounts).ok().out)
    plain = mounted["/tmp/plain"][0]
    for option, (more, less) in OPTIONS.items():
        assert mounted[f"/tmp/{option}"][0] == (plain - less) | more, option


def test_the_last_of_contradicting_options_applies(runtime: Runtime, data: Path) -> None:
    mounts = [bind(data, "/tmp/a", "ro", "noexec", "rw"), bind(data, "/tmp/b", "exec", "noexec")]
    mounted = parse_mountinfo(run(runtime, "cat /proc/self/mountinfo", *mounts).ok().out)
    assert {"rw", "noexec"} <= mounted["/tmp/a"][0] and "noexec" in mounted["/tmp/b"][0]


def test_a_mount_has_its_propagation(runtime: Runtime, data: Path) -> None:
    words = (
        "shared",
        "slave",
        "private",
        "unbindable",
        "rshared",
        "rslave",
        "rprivate",
        "runbindable",
    )
    mounts = [bind(data, f"/tmp/{word}", word) for word in words]
    mounted = parse_mountinfo(run(runtime, "cat /proc/self/mountinfo", *mounts).ok().out)
    for word in words:
        field = mounted[f"/tmp/{word}"][1]
        assert ("shared:" in field) == word.endswith("shared"), (word, field)
        assert ("unbindable" in field) == word.endswith("unbindable"), (word, field)
        if word.endswith("private"):
            assert field == ""


def test_missing_destinations_are_created(runtime: Runtime, data: Path) -> None:
    mounts = [
        bind(data, "/new/deep/er"),
        bind(data / "file", "/made/file"),
        bind(data, "relative/place"),
    ]
    script = "cat /new/deep/er/file /made/file /relative/place/file; stat -c %a /new /made"
    try:
        assert run(runtime, script, *mounts).ok().out.split() == ["content"] * 3 + ["755"] * 2
    finally:
        for name in ("new/deep/er", "new/deep", "new", "made", "relative/place", "relative"):
            folder = runtime.rootfs / name
            (folder / "file").unlink(missing_ok=True)
            folder.rmdir()


def test_new_filesystems_have_their_options(runtime: Runtime) -> None:
    mounts = [
        {"destination": "/tmp", "type": "tmpfs", "source": "x", "options": ["size=64k",
        "mode=1770", "ro", "nosuid"]},
        {"destination": "/root", "type": "tmpfs", "source": "y", "options": ["noatime"]},
    ]  # fmt: skip
    output = run(runtime, "cat /proc/self/mountinfo; stat -c %a /tmp /root", *mounts).ok().out
    places = parse_mountinfo("\n".join(line for line in output.splitlines() if " - " in line))
    assert places["/tmp"][0] >= {"ro", "nosuid"} and "noatime" in places["/root"][0]
    assert output.splitlines()[-2:] == ["1770", "755"]
    assert "size=64k" in next(line for line in output.splitlines() if " /tmp " in line)


def test_tmpcopyup_copies_the_covered_folder(runtime: Runtime) -> None:
    mount = {"destination": "/etc", "type": "tmpfs", "source": "t", "options": ["tmpcopyup"]}
    script = "cat /etc/passwd; echo x > /etc/new; grep -c ' /etc .* tmpfs ' /proc/self/mountinfo"
    output = run(runtime, script, mount).ok().out
    assert "root:x:0:0" in output and output.splitlines()[-1] == "1"
    assert not (runtime.rootfs / "etc/new").exists()


@pytest.mark.parametrize(
    ("mount", "words"),
    [
        (
            {"destination": "/tmp", "type": "bind", "source": "/no/such", "options": ["bind"]},
            "no such file",
        ),
        ({"destination": "/tmp", "type": "nosuchfs", "source": "x"}, "no such device"),
        (
            {"destination": "/tmp", "type": "tmpfs", "source": "x", "options": ["nosuch=1"]},
            "invalid argument",
        ),
        ({"destination": "/proc/sys", "type": "tmpfs", "source": "x"}, "inside /proc"),
        ({"destination": "/proc", "type": "tmpfs", "source": "x"}, "not of type proc"),
        ({"destination": "/", "type": "tmpfs", "source": "x"}, ""),
        ({"destination": "/tmp", "type": "tmpfs", "source": "x", "options": ["idmap"]}, ""),
        (
            {"destination": "/tmp", "type": "bind", "source": "/tmp", "options": ["bind", "idmap"]},
            "",
        ),
    ],
)
def test_an_invalid_mount_is_refused(runtime: Runtime, mount: dict[str, Any], words: str) -> None:
    run(runtime, "true", mount).fails(words)
    assert not runtime.root.exists() or not any(runtime.root.iterdir())


def test_an_id_mapped_mount_shows_mapped_owners(runtime: Runtime, data: Path) -> None:
    ids = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    mount = {**bind(data, "/tmp", "rprivate", "idmap"), "uidMappings": ids, "gidMappings": ids}
    assert run(runtime, "stat -c %u:%g /tmp/file", mount).ok().out == "100000:100000\n"


def test_read_only_and_masked_paths_are_protected(runtime: Runtime) -> None:
    paths = {
        "maskedPaths": ["/etc/passwd", "/root", "/no/such"],
        "readonlyPaths": ["/tmp", "/no/such"],
    }
    script = (
        "cat /etc/passwd; ls /root; touch /tmp/x 2>&1; touch /root/x 2>&1; echo x "
        "2>/dev/null > /etc/passwd; true"
    )
    lines = run(runtime, script, **paths).ok().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["Read-only file system"] * 2


@pytest.fixture
def mount_points(runtime: Runtime) -> Iterator[None]:
    """At the end, remove the runtime's mount points below /mnt in the root directory that tests
    share."""
    yield
    shutil.rmtree(runtime.rootfs / "mnt", ignore_errors=True)


@pytest.mark.usefixtures("mount_points")
def test_a_bind_of_a_path_in_the_root_shows_earlier_mounts(runtime: Runtime, data: Path) -> None:
    """A bind whose source is in the container's root shows earlier mounts there."""
    (data / "link").symlink_to("/../../sub")
    (data / "sub" / "inner").write_text("inner\n")
    root = runtime.rootfs
    # runc opens sources in the order of the mounts, and its own tests build such trees.
    mounts = [
        bind(data, "/tmp"),
        bind(root / "tmp", "/mnt/home"),
        {**bind(root / "tmp/file", "/mnt/file"), "options": ["bind"]},
        bind(root / "tmp/sub", "/tmp/sub/deep"),
        bind(root / "./tmp/../tmp/sub", str(root / "mnt/all")),
        {**bind(root, "/mnt/root"), "options": ["rbind", "ro"]},
    ]
    script = (
        "cat /mnt/home/file /mnt/file /tmp/sub/deep/inner /mnt/all/deep/inner"
        " /mnt/root/tmp/sub/deep/inner; touch /mnt/root/x 2>&1; ls /proc/self/fd"
    )
    result = run(runtime, script, *mounts).ok().out.split("\n")
    assert result[:5] == ["content", "content", "inner", "inner", "inner"]
    assert "Read-only" in result[5]
    assert result[6:] == ["0", "1", "2", "3", ""]


@pytest.mark.usefixtures("mount_points")
def test_a_link_cannot_lead_a_bind_of_a_path_in_the_root_out_of_it(
    runtime: Runtime, data: Path
) -> None:
    """If a bind's source is below the container's root, links in the source are resolved inside
    this root."""
    # runc resolves them on the host.
    if not runtime.is_pyrunc:
        pytest.skip("the reference follows the link")
    (data / "out").symlink_to("/")
    mounts = [bind(data, "/tmp"), bind(runtime.rootfs / f"tmp/out/{data}", "/mnt/home")]
    run(runtime, "cat /mnt/home/file", *mounts).fails("no such file")
    mounts[1] = bind(runtime.rootfs / "tmp/out/etc", "/mnt/home")
    assert run(runtime, "cat /mnt/home/passwd", *mounts).ok().out == (
        (runtime.rootfs / "etc/passwd").read_text()
    )


def test_links_of_the_image_do_not_count_below_an_earlier_mount(
    runtime: Runtime, rootfs: Path, data: Path
) -> None:
    """Where a volume covers a link of the image, the next mount is made in the volume, and not at
    the link's target."""
    (rootfs / "var/log/nginx").mkdir(parents=True)
    (rootfs / "var/log/nginx/access.log").symlink_to("/dev/stdout")
    (rootfs / "var/data").symlink_to("/missing")
    volume = data / "sub"
    result = run(
        runtime,
        "cat /var/log/nginx/access.log /missing/a; cat /proc/self/mountinfo",
        bind(volume, "/var/log/nginx"),
        bind(data / "file", "/var/log/nginx/access.log"),
        bind(volume, "/var/data"),
        bind(data / "file", "/var/data/a"),
    ).ok()
    assert result.out.startswith("content\ncontent\n")
    mounted = parse_mountinfo(result.out.partition("content\ncontent\n")[2])
    assert {"/var/log/nginx/access.log", "/missing/a"} <= mounted.keys()
    assert "/dev/stdout" not in mounted and (volume / "access.log").read_text() == ""
