"""Tests which host binds of a spec the server opens for the compiler, and which of them need a
descriptor of the shim."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.spec import host_binds
from cri_server.spec.host_binds import HostBind
from pyrunc.compile.requests import CgroupChoice, Overlay
from pyrunc.shim.files import LaunchFile, OtherRuntime, PreparedMount

OWN = ("/root", "/state")
LAUNCH = LaunchFile(Overlay(), CgroupChoice(), settled=["/volume", "/root/asked for"])


def bind(source: str, *options: str) -> dict[str, Any]:
    return {
        "destination": f"/at{source}",
        "type": "bind",
        "source": source,
        "options": ["rbind", *options],
    }


def specification(*mounts: dict[str, Any], **more: Any) -> dict[str, Any]:
    linux = {
        "namespaces": [{"type": "mount"}],
        "seccomp": {"of no": "interest"},
        **more.pop("linux", {}),
    }
    return {"ociVersion": "1.2.0", "mounts": list(mounts), "linux": linux, **more}


def test_files_of_the_server_are_not_foreign() -> None:
    spec = specification(
        {"destination": "/proc", "type": "proc", "source": "proc"},
        *map(bind, ("/root/hosts", "/state/x", "/sys", "/dev/shm", "pyrunc:shm", "relative")),
        *map(bind, ("/volume", "/root/asked for", "/of a plugin", "/rooted")),
        {**bind("/volume", "remount"), "destination": "/again"},
    )
    assert host_binds.of(spec, LAUNCH, OWN) == [
        HostBind("/volume", "/at/volume", links=False, made_inside=True),
        HostBind("/root/asked for", "/at/root/asked for", links=False, made_inside=True),
        HostBind("/of a plugin", "/at/of a plugin", links=True, made_inside=True),
        HostBind("/rooted", "/at/rooted", links=True, made_inside=True),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        specification(bind("/volume"), linux={"namespaces": [{"type": "mount"}, {"type": "user"}]}),
        specification(bind("/volume"), linux={"namespaces": []}),
        specification(bind("/volume"), hooks={"createContainer": [{"path": "/hook"}]}),
        specification(bind("/volume", "rshared"), linux={"rootfsPropagation": "rshared"}),
        specification(
            {**bind("/volume"), "uidMappings": [{"containerID": 0, "hostID": 1, "size": 1}]}
        ),
    ],
)
def test_the_process_does_not_make_a_bind_of_a_clone(spec: dict[str, Any]) -> None:
    (host_bind,) = host_binds.of(spec, LAUNCH, OWN)
    assert not host_bind.made_inside


def test_an_external_runtime_gets_the_attached_binds() -> None:
    spec = specification({**bind("/state/c/mounts/1"), "destination": "/v"}, bind("/of a plugin"))
    places = [PreparedMount("mounts/0", pinned="shm"), PreparedMount("mounts/1", source="/volume")]
    launch_file = LAUNCH.replace(runtime=OtherRuntime("/bin/runc"), places=places)
    assert host_binds.of(spec, launch_file, OWN) == [
        HostBind("/volume", "/v", links=False, made_inside=False)
    ]
