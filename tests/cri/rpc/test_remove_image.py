"""RemoveImage: which names and data it removes, concurrent callers, and images that containers
use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.images import an_image, image_status, images, pull, remove
from tests.cri.server_harness import IMAGE, Server, code_of
from tests.support.registry import Registry


@pytest.mark.requirement("5.4.1", "13.4")
def test_an_id_removes_every_name_and_a_name_only_itself(
    server: Server, registry: Registry
) -> None:
    """Removing by id removes the names in all repositories. Removing the last name removes the
    image."""
    one = an_image("removed")
    names = [
        f"{registry.host}/removed/{app}:{tag}" for app in ("app", "other") for tag in ("a", "b")
    ]
    for name in names:
        registry.push(name.removeprefix(f"{registry.host}/"), one)
        identifier = pull(server, name)
    remove(server, names[0])
    assert image_status(server, names[0]) is None
    by_id = image_status(server, identifier)
    assert by_id is not None and sorted(by_id.repo_tags) == names[1:]
    remove(server, identifier)
    assert not any(image_status(server, name) for name in [*names, identifier])
    assert identifier not in {image.id for image in images(server)}
    pull(server, names[0])
    remove(server, names[0])
    assert image_status(server, identifier) is None


@pytest.mark.requirement("5.4.2", "1.a.3")
def test_five_concurrent_removals_and_a_removal_of_a_missing_image_succeed(
    server: Server, registry: Registry
) -> None:
    registry.push("five/app:v1", an_image("five"))
    identifier = pull(server, f"{registry.host}/five/app:v1")
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: remove(server, identifier), range(5)))
    assert image_status(server, identifier) is None
    remove(server, identifier)
    remove(server, "registry.test/none:1")


@pytest.mark.requirement("5.4.3", "13.5")
def test_an_image_of_a_container_is_not_removed(server: Server) -> None:
    """RemoveImage fails also if the container has ended."""
    container = server.launch(server.run_pod(), server.container_config(["true"]))
    server.wait_exit(container)
    assert code_of(lambda: remove(server, IMAGE)) == grpc.StatusCode.FAILED_PRECONDITION
    assert image_status(server, IMAGE) is not None


# The keys are words of the errors.
FAILING: dict[str, dict[str, Any]] = {
    "CDI": {"CDI_devices": [api.CDIDevice(name="registry.test/none=0")]},
    "image_sub_path": {
        "mounts": [
            api.Mount(
                container_path="/v",
                image=api.ImageSpec(image="VOLUME"),
                image_sub_path="none",
                readonly=True,
            )
        ]
    },
}


@pytest.mark.parametrize("what", FAILING)
def test_an_image_is_no_longer_in_use_when_its_container_could_not_be_created(
    server: Server, registry: Registry, what: str
) -> None:
    registry.push("failed/app:v1", an_image("failed"))
    name = f"{registry.host}/failed/app:v1"
    pull(server, name)
    config = server.container_config(**FAILING[what], image=api.ImageSpec(image=name))
    for mount in config.mounts:
        mount.image.image = name
    with pytest.raises(grpc.RpcError, match=what):
        server.create(server.run_pod(), config)
    remove(server, name)
    assert image_status(server, name) is None
