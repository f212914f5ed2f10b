"""Tests `pyrunc` with AppArmor profiles for a container and an exec, and with mounts of mapped
ids."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vm.oci.commands import Container

PROFILE = "pyrunc-oci-test"
RULES = f"""abi <abi/4.0>,
profile {PROFILE} flags=(attach_disconnected,mediate_deleted) {{
  file,
  capability,
  network,
  signal,
  deny /secret rw,
  deny /kept/** w,
}}
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("apparmor") / PROFILE
    path.write_text(RULES)
    subprocess.run(["apparmor_parser", "--replace", "--skip-cache", str(path)], check=True)
    yield PROFILE
    subprocess.run(["apparmor_parser", "--remove", str(path)], check=True)


def confine(name: str) -> Any:
    def change(config: dict[str, Any]) -> None:
        config["process"]["apparmorProfile"] = name
        config["process"]["noNewPrivileges"] = False

    return change


@pytest.mark.parametrize("no_new_privileges", [False, True])
def test_the_profile_confines_init_and_exec(
    container: Container, profile: str, no_new_privileges: bool
) -> None:
    def change(config: dict[str, Any]) -> None:
        confine(profile)(config)
        config["process"]["noNewPrivileges"] = no_new_privileges

    container.make("sleep", "1000", change=change)
    (container.bundle / "rootfs/secret").write_text("secret")
    (container.bundle / "rootfs/kept").mkdir()
    container.run()
    label = Path(f"/proc/{container.state['pid']}/attr/current").read_text().rstrip("\0\n")
    assert label == f"{profile} (enforce)"
    inside = container.sh(
        "cat /proc/self/attr/current; cat /secret; echo > /kept/x; echo > /fine && echo made",
        check=False,
    )
    assert profile in inside.stdout and "made" in inside.stdout
    assert inside.stderr.count("Permission denied") == 2


def test_an_exec_may_have_a_separate_profile(container: Container, profile: str) -> None:
    container.make(
        "sleep", "1000", change=lambda config: config["process"].update(noNewPrivileges=False)
    )
    (container.bundle / "rootfs/secret").write_text("secret")
    container.run()
    assert container.sh("cat /secret").stdout == "secret"
    refused = container.sh(
        "cat /proc/self/attr/current; cat /secret", "--apparmor", profile, check=False
    )
    assert profile in refused.stdout and "Permission denied" in refused.stderr


def test_a_profile_that_is_not_loaded_is_an_error(container: Container) -> None:
    container.make("true", change=confine("no-such-profile"))
    failed = container.pyrunc("run", "--bundle", container.bundle, container.id, check=False)
    assert failed.returncode == 1 and "apparmor" in failed.stderr.lower()
    assert container.id not in container.pyrunc("list", "-q").stdout.split()


def test_mapped_mounts_keep_their_owners(container: Container) -> None:
    """The container has a user namespace, and sees the files of an id-mapped host folder with the
    owner ids that they have on the host."""
    shared = container.folder / "shared"
    shared.mkdir()
    (shared / "of-root").touch()
    (shared / "of-1000").touch()
    os.chown(shared / "of-1000", 1000, 1000)

    def change(config: dict[str, Any]) -> None:
        linux = config["linux"]
        linux["namespaces"].append({"type": "user"})
        linux["uidMappings"] = linux["gidMappings"] = [
            {"containerID": 0, "hostID": 200_000, "size": 65536}
        ]
        options = ["bind", "idmap"]
        config["mounts"].append(
            {"destination": "/shared", "type": "bind", "source": str(shared), "options": options}
        )

    container.make("sleep", "1000", change=change)
    subprocess.run(["chown", "-R", "200000:200000", str(container.bundle / "rootfs")], check=True)
    container.run()
    pid = container.state["pid"]
    assert Path(f"/proc/{pid}/uid_map").read_text().split() == ["0", "200000", "65536"]
    inside = container.sh(
        "stat -c '%n %u' /shared/*; touch /shared/made; chown 1000 /shared/made 2>&1; id -u"
    ).stdout
    assert "/shared/of-root 0" in inside and "/shared/of-1000 1000" in inside
    assert (shared / "made").stat().st_uid == 0
    assert "idmapped" in Path(f"/proc/{pid}/mountinfo").read_text()
    assert oct(os.stat(f"/proc/{pid}/root/dev/null").st_mode & 0o7777) == "0o666"
