"""Tests containers of an ordinary user: with the user's id alone or with granted ids, with a cgroup
of the user's systemd or without."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vm.oci import commands
from tests.vm.oci.commands import Container, User

MIB = 1 << 20
Change = Callable[[dict[str, Any]], None]


def rootless(maps: list[tuple[int, int, int]], *, limits: bool = False) -> Change:
    """Return a function that changes a configuration to one like that of `spec --rootless`. `maps`:
    (id inside, id outside, count) of each mapping."""

    def change(config: dict[str, Any]) -> None:
        linux = config["linux"]
        linux["namespaces"].append({"type": "user"})
        linux["uidMappings"] = [{"containerID": i, "hostID": o, "size": n} for i, o, n in maps]
        linux["gidMappings"] = linux["uidMappings"]
        if not limits:
            del linux["resources"]
        if len(maps) == 1:  # group 5 is the overflow group there
            for mount in config["mounts"]:
                mount["options"] = [o for o in mount.get("options", []) if not o.startswith("gid=")]

    return change


@pytest.fixture
def granted(alice: User) -> list[tuple[int, int, int]]:
    first, count = commands.granted_ids("alice")
    return [(0, alice.uid, 1), (1, first, count)]


@pytest.fixture
def plain(alice: User, tmp_path: Path) -> Iterator[Container]:
    """Provide a container of Alice without systemd: without the session's bus, and without a
    cgroup."""
    user = User("alice", alice.uid, bus=False)
    Path(user.runtime_dir).mkdir(mode=0o700, exist_ok=True)
    os.chown(user.runtime_dir, user.uid, user.uid)
    container = Container(tmp_path, user)
    yield container
    container.remove()
    assert not Path(f"{user.runtime_dir}/pyrunc/{container.id}").exists()


@pytest.fixture
def scoped(alice: User, tmp_path: Path) -> Iterator[Container]:
    """Provide a container of Alice in a scope of her systemd."""
    container = Container(tmp_path, alice, "--systemd-cgroup")
    yield container
    container.remove()
    units = alice.output(
        "systemctl", "--user", "list-units", "--all", "--plain", "--no-legend", "pyrunc-*"
    )
    assert container.id not in units


def test_a_container_runs_with_only_the_users_id(plain: Container) -> None:
    plain.make("sleep", "1000", change=rootless([(0, 1000, 1)]))
    plain.run()
    pid = plain.state["pid"]
    assert Path(f"/proc/{pid}/uid_map").read_text().split() == ["0", "1000", "1"]
    assert Path(f"/proc/{pid}/setgroups").read_text().strip() == "deny"
    assert plain.state["owner"] == "alice"
    assert plain.sh("id -u; touch /made; stat -c %u:%g /made").stdout.split() == ["0", "0:0"]
    assert (plain.bundle / "rootfs/made").stat().st_uid == 1000
    refused = plain.pyrunc("exec", "--user", "5", plain.id, "true", check=False)
    assert refused.returncode == 255 and "setresuid" in refused.stderr


def test_a_container_runs_with_granted_ids(
    plain: Container, granted: list[tuple[int, int, int]]
) -> None:
    plain.make("sleep", "1000", change=rootless(granted))
    plain.run()
    pid = plain.state["pid"]
    maps = Path(f"/proc/{pid}/uid_map").read_text().split()
    assert maps == [str(number) for entry in granted for number in entry]
    inside = plain.sh(
        "id; grep -E 'CapBnd|Groups' /proc/self/status", "--user", "5:6", "-g", "7"
    ).stdout
    assert "uid=5 gid=6" in inside and inside.split("Groups:")[1].split()[0] == "7"
    plain.sh("touch /tmp/hers && chown 5:6 /tmp/hers", "--cap", "CAP_CHOWN")
    status = (plain.bundle / "rootfs/tmp/hers").stat()
    assert (status.st_uid, status.st_gid) == (granted[1][1] + 4, granted[1][1] + 5)


def test_ids_that_are_not_granted_are_refused(plain: Container) -> None:
    plain.make("true", change=rootless([(0, 1000, 1), (1, 700_000, 1000)]))
    failed = plain.pyrunc("run", "--bundle", plain.bundle, plain.id, check=False)
    assert (
        failed.returncode == 1 and "not allowed" in failed.stderr and "newuidmap" in failed.stderr
    )
    assert plain.pyrunc("list", "-q").stdout == ""


def test_root_of_a_rootless_container_cannot_change_the_machine(
    plain: Container, granted: list[tuple[int, int, int]]
) -> None:
    """Root inside owns neither the machine's files nor its devices nor its network."""
    secret = plain.folder / "secret"
    secret.write_text("for root only")
    secret.chmod(0o600)

    def change(config: dict[str, Any]) -> None:
        rootless(granted)(config)
        config["mounts"].append(
            {"destination": "/secret", "type": "bind", "source": str(secret), "options": ["bind"]}
        )

    plain.make("sleep", "1000", change=change)
    plain.run()
    assert "Permission denied" in plain.sh("cat /secret", check=False).stderr
    assert "not permitted" in plain.sh("mknod /x b 253 0", check=False).stderr
    assert plain.sh("ip -o link | wc -l").stdout.strip() == "1"
    assert "0 0" in plain.sh("stat -c '%t %T' /dev/null; stat -c '%u %g' /tmp").stdout


def test_a_rootless_container_is_created_started_signalled_and_deleted(
    plain: Container, granted: list[tuple[int, int, int]]
) -> None:
    plain.make(
        "sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done", change=rootless(granted)
    )
    plain.pyrunc("create", "--bundle", plain.bundle, plain.id)
    assert plain.state["status"] == "created"
    plain.pyrunc("start", plain.id)
    plain.wait("running")
    time.sleep(1)  # the trap is set
    plain.pyrunc("kill", plain.id, "TERM")
    plain.wait("stopped")
    plain.pyrunc("delete", plain.id)


def test_an_attached_rootless_container_has_an_exit_code_and_a_terminal(
    plain: Container, granted: list[tuple[int, int, int]]
) -> None:
    plain.make("sh", "-c", "exit 7", change=rootless(granted))
    assert plain.pyrunc("run", "--bundle", plain.bundle, plain.id, check=False).returncode == 7
    config = json.loads((plain.bundle / "config.json").read_text())
    config["process"] |= {"terminal": True, "args": ["sh", "-c", "tty; stat -c %u /dev/console"]}
    (plain.bundle / "config.json").write_text(json.dumps(config))
    output = plain.pyrunc("run", "--bundle", plain.bundle, plain.id, terminal=True).stdout
    assert output.split() == ["/dev/pts/0", "0"]


@pytest.mark.parametrize("resource", ["limits", "path"])
def test_limits_without_permission_for_cgroups_are_refused(plain: Container, resource: str) -> None:
    def change(config: dict[str, Any]) -> None:
        rootless([(0, 1000, 1)])(config)
        linux = config["linux"]
        linux.update(
            {"resources": {"pids": {"limit": 5}}}
            if resource == "limits"
            else {"cgroupsPath": "/mine"}
        )

    plain.make("true", change=change)
    failed = plain.pyrunc("run", "--bundle", plain.bundle, plain.id, check=False)
    assert failed.returncode == 1 and "no limits + no cgrouppath" in failed.stderr


def test_a_mapped_mount_and_no_user_namespace_are_refused(plain: Container) -> None:
    def change(config: dict[str, Any]) -> None:
        rootless([(0, 1000, 1)])(config)
        config["mounts"].append(
            {"destination": "/m", "type": "bind", "source": "/tmp", "options": ["bind", "idmap"]}
        )

    plain.make("true", change=change)
    failed = plain.pyrunc("run", "--bundle", plain.bundle, plain.id, check=False)
    assert failed.returncode == 1 and "id-mapped" in failed.stderr
    config = json.loads((plain.bundle / "config.json").read_text())
    del config["linux"]["uidMappings"], config["linux"]["gidMappings"]
    config["linux"]["namespaces"].pop()
    config["mounts"].pop()
    (plain.bundle / "config.json").write_text(json.dumps(config))
    failed = plain.pyrunc("run", "--bundle", plain.bundle, plain.id, check=False)
    assert failed.returncode == 1 and "requires user namespaces" in failed.stderr


def test_the_users_systemd_limits_a_rootless_container(
    scoped: Container, granted: list[tuple[int, int, int]]
) -> None:
    resources = {"memory": {"limit": 64 * MIB}, "pids": {"limit": 33}}
    scoped.make("sleep", "1000", change=rootless(granted, limits=True), resources=resources)
    scoped.run()
    assert (
        "/user@1000.service/" in str(scoped.group)
        and scoped.group.name == f"pyrunc-{scoped.id}.scope"
    )
    assert (scoped.group / "memory.max").read_text().strip() == str(64 * MIB)
    assert (scoped.group / "pids.max").read_text().strip() == "33"
    assert scoped.sh("cat /proc/self/cgroup").stdout.strip() == "0::/"
    assert len((scoped.group / "cgroup.procs").read_text().split()) == 1
    scoped.pyrunc("pause", scoped.id)
    assert scoped.state["status"] == "paused"
    scoped.pyrunc("resume", scoped.id)
    scoped.pyrunc("update", "--pids-limit", "44", scoped.id)
    assert (scoped.group / "pids.max").read_text().strip() == "44"
    scoped.pyrunc("kill", "--all", scoped.id, "KILL")
    scoped.wait("stopped")


def test_a_rootless_container_starts_from_a_login_session(
    scoped: Container, granted: list[tuple[int, int, int]]
) -> None:
    """The runtime is moved out of the session's cgroup to the user's systemd; its caller stays."""
    scoped.make("sleep", "1000", change=rootless(granted))
    session = commands.CGROUPS / f"session-test-{os.getpid()}"
    # Its only common ancestor with the cgroups of the user's systemd belongs to root.
    session.mkdir()
    script = scoped.folder / "script"
    script.write_text(
        f"{commands.PYRUNC} --systemd-cgroup run -d --bundle {scoped.bundle} {scoped.id} >/dev/null"
        " 2>&1\necho $?; cat /proc/self/cgroup\n"
    )
    try:
        enter = (
            f"echo $$ >{session}/cgroup.procs; exec setpriv --reuid=1000 --regid=1000"
            f" --clear-groups sh {script}"
        )
        environment = {"PATH": commands.PATH, "USER": "alice", "XDG_RUNTIME_DIR": "/run/user/1000"}
        done = subprocess.run(
            ["sh", "-c", enter],
            capture_output=True,
            text=True,
            env=environment,
            cwd="/tmp",
            check=True,
        )
        assert done.stdout.split() == ["0", f"0::/{session.name}"], done
        assert "/user@1000.service/" in str(scoped.group)
    finally:
        session.rmdir()
