"""The step of CreateContainer that labels volumes, with its own zygote."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cri_server.api import api_pb2 as api
from cri_server.containers.create import CreateContext, label_volumes
from cri_server.security.selinux import relabel
from cri_server.security.selinux.labels import SelinuxLabels
from cri_server.zygote.client import Zygote
from pyrunc.errors import PeerError
from tests.unit.security.selinux.test_labels import POLICY

LABELS = SelinuxLabels(
    "system_u:system_r:container_t:s0:c1,c2", "system_u:object_r:container_file_t:s0:c1,c2"
)


async def label(volume: Path) -> None:
    """Label a volume as for a new container."""
    zygote = Zygote([])
    mount = api.Mount(host_path=str(volume), selinux_relabel=True)
    work: Any = SimpleNamespace(
        services=SimpleNamespace(node=SimpleNamespace(selinux=POLICY), zygote=zygote),
        config=api.ContainerConfig(),
        sandbox=SimpleNamespace(selinux=LABELS),
        requested_mounts=[SimpleNamespace(source=str(volume), request=mount)],
    )
    try:
        await label_volumes(cast(CreateContext, work))
    finally:
        await zygote.close()


async def test_a_volume_is_labelled(tmp_path: Path) -> None:
    await label(tmp_path)
    assert os.getxattr(tmp_path, relabel.ATTRIBUTE).decode() == LABELS.mount


async def test_an_interrupted_relabelling_fails_create_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A job that ends by a signal, or by an exception that is no Error, replies with its exit code
    # alone.
    monkeypatch.setattr(relabel, "JOB", "os:abort")
    with pytest.raises(PeerError, match=f"relabelling of {tmp_path} failed with exit code"):
        await label(tmp_path)
