"""Rootless containers of an ordinary user: with the user's own id alone, which needs no grant, and
with ids from /etc/subuid. A user's own systemd and a whole range of ids are tested in the guest
(tests/vm/oci)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pyrunc
from pyrunc.cli import entry
from tests.support import bundle
from tests.support.processes import wait_until

UID = 54_321
Done = subprocess.CompletedProcess[str]


class RootlessRuntime:
    """A copy of the runtime that the user can read, a bundle and a runtime folder; the container is
    called `one`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bundle, self.runtime = folder, folder / "bundle", folder / "runtime"
        self.etc: list[str] = []  # files of hers that she sees in /etc
        folder.chmod(0o755)
        shutil.copytree(Path(pyrunc.__file__).parent, folder / "lib/pyrunc")
        self.program = folder / "pyrunc"
        self.program.write_text(
            entry.script(os.path.realpath(sys.executable), [str(folder / "lib")])
        )
        self.program.chmod(0o755)
        self.runtime.mkdir(mode=0o700)
        os.chown(self.runtime, UID, UID)

    def make(self, *command: str, **linux: Any) -> None:
        config = bundle.configuration(*command, uidMappings=MAP, gidMappings=MAP, **linux)
        config["linux"]["namespaces"].append({"type": "user"})
        if "resources" not in linux:
            del config["linux"]["resources"]
        config["mounts"] = [mount for mount in config["mounts"] if mount["type"] != "cgroup"]
        for mount in config["mounts"]:
            mount["options"] = [o for o in mount.get("options", []) if not o.startswith("gid=")]
        bundle.make(self.bundle, config)
        subprocess.run(["chown", "-R", f"{UID}:{UID}", str(self.bundle)], check=True)

    def pyrunc(self, *words: str | Path, check: bool = True) -> Done:
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        if self.etc:
            mounts = " && ".join(
                f"mount --bind {self.folder / name} /etc/{name}" for name in self.etc
            )
            become = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh", *become]
        with open(self.folder / "out", "w+") as out, open(self.folder / "err", "w+") as err:
            ended = subprocess.run(
                [*become, str(self.program), *map(str, words)], stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, cwd="/tmp",
                env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(self.runtime)},
                check=False, timeout=60,
            )  # fmt: skip
            out.seek(0)
            err.seek(0)
            done = Done(ended.args, ended.returncode, out.read(), err.read())
        assert not check or done.returncode == 0, (
            f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done

    def state(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.pyrunc("state", name).stdout)
        return document


MAP = [{"containerID": 0, "hostID": UID, "size": 1}]


@pytest.fixture
def rootless() -> Iterator[RootlessRuntime]:
    folder = Path(tempfile.mkdtemp(prefix="rootless-", dir="/tmp"))
    runtime = RootlessRuntime(folder)
    try:
        yield runtime
    finally:
        runtime.pyrunc("delete", "--force", "one")
        assert not list(runtime.runtime.glob("pyrunc/[!.]*"))
        shutil.rmtree(folder)


def test_a_rootless_container_is_created_started_and_deleted(rootless: RootlessRuntime) -> None:
    rootless.make("sleep", "1000")
    rootless.pyrunc("create", "--bundle", rootless.bundle, "one")
    assert rootless.state("one")["status"] == "created"
    rootless.pyrunc("start", "one")
    state = rootless.state("one")
    assert state["status"] == "running"
    root = rootless.runtime / "pyrunc"
    assert (root.stat().st_uid, root.stat().st_mode & 0o7777) == (UID, 0o1700)
    process = Path(f"/proc/{state['pid']}")
    assert (process / "uid_map").read_text().split() == ["0", str(UID), "1"]
    assert (process / "setgroups").read_text().strip() == "deny" and process.stat().st_uid == UID
    inside = rootless.pyrunc(
        "exec", "one", "sh", "-c", "id -u; touch /made; cat /proc/self/uid_map; ls /dev"
    )
    assert inside.stdout.split()[:4] == ["0", "0", str(UID), "1"] and "null" in inside.stdout
    assert (rootless.bundle / "rootfs/made").stat().st_uid == UID
    rootless.pyrunc("kill", "one", "KILL")
    assert wait_until(lambda: rootless.state("one")["status"] == "stopped", 60)
    rootless.pyrunc("delete", "one")


def test_an_attached_run_has_the_containers_exit_code(rootless: RootlessRuntime) -> None:
    rootless.make("sh", "-c", "echo said; exit 7")
    done = rootless.pyrunc("run", "--no-subreaper", "--bundle", rootless.bundle, "one", check=False)
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr


def test_root_of_a_rootless_container_has_no_rights_outside(rootless: RootlessRuntime) -> None:
    """The container's root can use neither the machine's files nor ids that the user does not
    have."""
    secret = rootless.folder / "secret"
    secret.write_text("for root only")
    secret.chmod(0o600)
    rootless.make("sleep", "1000")
    config = json.loads((rootless.bundle / "config.json").read_text())
    mount = {"destination": "/secret", "type": "bind", "source": str(secret), "options": ["bind"]}
    config["mounts"].append(mount)
    (rootless.bundle / "config.json").write_text(json.dumps(config))
    rootless.pyrunc("run", "-d", "--bundle", rootless.bundle, "one")
    refused = rootless.pyrunc("exec", "one", "cat", "/secret", check=False)
    assert "Permission denied" in refused.stderr and "for root only" not in refused.stdout
    other = rootless.pyrunc("exec", "--user", "5", "one", "true", check=False)
    assert other.returncode == 255 and "setresuid" in other.stderr


GRANTED = 200_000
KEPT = [{"containerID": 0, "hostID": GRANTED, "size": UID}, {"containerID": UID, "hostID": UID,
    "size": 1},
        {"containerID": UID + 1, "hostID": GRANTED + UID, "size": 10}]  # fmt: skip


def test_root_can_be_mapped_to_a_granted_id(rootless: RootlessRuntime) -> None:
    """The user's own id is mapped to itself and root to an id of /etc/subuid, as by `podman run
    --userns=keep-id`. The files stay the user's."""
    for name, line in (
        ("passwd", f"hers:x:{UID}:{UID}::/:/bin/sh"),
        ("subuid", f"hers:{GRANTED}:65536"),
        ("subgid", f"hers:{GRANTED}:65536"),
    ):
        (rootless.folder / name).write_text(
            f"root:x:0:0::/:/bin/sh\n{line}\n" if name == "passwd" else f"{line}\n"
        )
        rootless.etc.append(name)
    rootless.make("sleep", "1000")
    config = json.loads((rootless.bundle / "config.json").read_text())
    config["linux"].update(uidMappings=KEPT, gidMappings=KEPT)
    config["process"]["user"] = {"uid": UID, "gid": UID}
    config["process"]["capabilities"] = {}
    (rootless.bundle / "config.json").write_text(json.dumps(config))
    rootless.pyrunc("create", "--bundle", rootless.bundle, "one")
    rootless.pyrunc("start", "one")
    state = rootless.state("one")
    process = Path(f"/proc/{state['pid']}")
    assert state["status"] == "running" and process.stat().st_uid == UID
    assert len((process / "uid_map").read_text().splitlines()) == 3
    assert all(p.lstat().st_uid == UID for p in (rootless.runtime / "pyrunc").rglob("*"))
    assert rootless.pyrunc("exec", "--user", "0", "one", "id", "-u").stdout.split() == ["0"]
    assert rootless.pyrunc("exec", "one", "id", "-u").stdout.split() == [str(UID)]
    rootless.pyrunc("kill", "one", "KILL")
    assert wait_until(lambda: rootless.state("one")["status"] == "stopped", 60)
    rootless.pyrunc("delete", "one")


@pytest.mark.parametrize(
    ("linux", "why"),
    [
        ({"resources": {"pids": {"limit": 5}}}, "no limits + no cgrouppath"),
        ({"cgroupsPath": "/hers"}, "no limits + no cgrouppath"),
        ({"uidMappings": [{"containerID": 1, "hostID": UID, "size": 1}]}, "id 0 must be mapped"),
        (
            {"gidMappings": [{"containerID": 0, "hostID": UID + 1, "size": 1}]},
            f"own id {UID} must be mapped",
        ),
        (
            {
                "namespaces": [{"type": "mount"}, {"type": "uts"}],
                "uidMappings": [],
                "gidMappings": [],
            },
            "requires user namespaces",
        ),
    ],
    ids=["limits", "path", "map", "foreign-map", "namespace"],
)
def test_settings_that_need_root_are_refused(
    rootless: RootlessRuntime, linux: dict[str, Any], why: str
) -> None:
    rootless.make("true")
    config = json.loads((rootless.bundle / "config.json").read_text())
    config["linux"].update(linux)
    (rootless.bundle / "config.json").write_text(json.dumps(config))
    failed = rootless.pyrunc(
        "run", "--no-subreaper", "--bundle", rootless.bundle, "one", check=False
    )
    assert failed.returncode == 1 and why in failed.stderr, failed.stderr
