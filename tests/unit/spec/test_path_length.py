"""Tests that paths longer than the kernel allows are refused, for each field of requests and
images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.containers import anonymous_volumes, create
from cri_server.spec import build, mounts, path_length, process, sources
from pyrunc.errors import InvalidArgument

LONG = "/d" * 2048
NAMES = ("é" * 127, "n" * 255)  # 254 and 255 bytes


@pytest.mark.parametrize("path", ["", "/", LONG[:-1], *NAMES, "/a/" + NAMES[0], "/\udcff" * 2000])
def test_paths_that_the_kernel_takes_pass(path: str) -> None:
    path_length.check(path, "field")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (LONG, "field has 4096 bytes; a path has at most 4095"),
        ("/a/" + "n" * 256 + "/b", "field has a name of 256 bytes; a name has at most 255"),
        ("é" * 128, "field has a name of 256 bytes; a name has at most 255"),
    ],
)
def test_longer_paths_are_refused(path: str, error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        path_length.check(path, "field")
    assert caught.value.message == error


def check_security(**fields: list[str]) -> None:
    context = api.LinuxContainerSecurityContext(**fields)
    config = api.ContainerConfig(metadata=api.ContainerMetadata(name="c"))
    config.linux.security_context.CopyFrom(context)
    build.check(config, api.PodSandboxConfig())


def log_path(directory: str, path: str) -> None:
    create.log_path(
        api.PodSandboxConfig(log_directory=directory), api.ContainerConfig(log_path=path)
    )


FIELDS: dict[str, Callable[[], object]] = {
    "config.working_dir": lambda: process.working_dir(LONG, "/"),
    "the image's WorkingDir": lambda: process.working_dir("", LONG),
    "the working directory": lambda: process.changed({}, {"cwd": LONG}),
    "config.command[0]": lambda: process.argv([LONG], [], [], []),
    "the image's entrypoint": lambda: process.argv([], [], [LONG], []),
    "mounts[0]: container_path": lambda: mounts.check_requests(
        [api.Mount(container_path=LONG, host_path="/x")]
    ),
    "mounts[0]: host_path": lambda: mounts.check_requests(
        [api.Mount(container_path="/x", host_path=LONG)]
    ),
    "mounts[0]: image_sub_path": lambda: mounts.check_requests(
        [api.Mount(container_path="/x", image_sub_path=LONG)]
    ),
    "devices[0]: host_path": lambda: sources.devices([api.Device(host_path=LONG)]),
    "devices[0]: container_path": lambda: sources.devices(
        [api.Device(host_path="/dev/null", container_path=LONG)]
    ),
    "config.linux.security_context.masked_paths[1]": lambda: check_security(
        masked_paths=["/x", LONG]
    ),
    "config.linux.security_context.readonly_paths[0]": lambda: check_security(
        readonly_paths=[LONG]
    ),
    "a volume that the image declares": lambda: anonymous_volumes.declared(
        [LONG], [], Path("/"), api.UserNamespace()
    ),
    "config.log_path": lambda: log_path("/logs", LONG[1:] + "x"),
    "log_directory with log_path": lambda: log_path("/logs", LONG[1:]),
}


@pytest.mark.parametrize("field", FIELDS)
def test_the_error_names_the_field(field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        FIELDS[field]()
    assert caught.value.message.startswith(f"{field} has 4")
