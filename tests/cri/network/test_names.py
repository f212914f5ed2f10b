"""Tests the names of pods' network namespaces: every call of a plugin gets the same name, which is
removed with the pod."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cri_server.network import names
from pyrunc.abi.mount import MNT_DETACH
from pyrunc.errors import KernelError, PeerError
from pyrunc.kernel.mount import umount2
from tests.cri.network.conftest import ADD_ONLY, RESULT, Node, clean, until
from tests.kernel.cni.harness import Pod

NOTE = f"echo \"$CNI_COMMAND $CNI_NETNS\" >>$LOG; {ADD_ONLY}; echo '{RESULT}'"


def is_of(path: str, pod: Pod) -> bool:
    return (
        os.stat(path).st_ino == os.fstat(pod.fd).st_ino
        and os.stat(path).st_dev == os.fstat(pod.fd).st_dev
    )


async def test_every_call_gets_the_same_name_while_the_pod_is_attached(node: Node) -> None:
    node.plugin("note", NOTE)
    node.configure({"type": "note"})
    pod = node.host.pod()
    result = await node.attach(pod)
    name = node.name_of(pod)
    assert result.netns_path == name and is_of(name, pod) and os.path.basename(name) == pod.id
    assert [i["sandbox"] for i in result.raw["interfaces"]] == [name]
    await node.check(pod.id)
    node.restart()
    await node.network.update_path(pod.id, "/proc/1/fd/1")  # another shim has the pod: a name stays
    assert (await node.network.result_of(pod.id)).netns_path == name  # type: ignore[union-attr]
    await node.network.detach(pod.id, "/proc/1/fd/1")
    assert node.log().split("\n")[:-1] == [
        f"{command} {name}" for command in ("ADD", "CHECK", "DEL")
    ]
    assert clean(node)


async def test_the_namespace_outlives_its_shim_until_del(node: Node) -> None:
    node.plugin("note", NOTE)
    node.configure({"type": "note"})
    pod = node.host.pod()
    await node.attach(pod)
    inode = os.fstat(pod.fd).st_ino
    pod.close()
    assert os.stat(node.name_of(pod)).st_ino == inode
    await node.network.detach(pod.id)
    assert node.log().split("\n")[1] == f"DEL {node.name_of(pod)}"
    assert clean(node)


@pytest.mark.parametrize("also", [True, False])
async def test_a_pod_whose_name_another_program_removed_is_detached(node: Node, also: bool) -> None:
    """After `ip -all netns del`, DEL gets another path of the network namespace, or none, which the
    CNI specification permits."""
    node.plugin("note", NOTE)
    node.configure({"type": "note"})
    pod = node.host.pod()
    await node.attach(pod)
    names.remove(node.name_of(pod))
    await node.network.detach(pod.id, pod.path if also else None)
    assert node.log().split("\n")[1] == f"DEL {pod.path if also else ''}"
    assert clean(node)


async def test_the_file_of_a_name_after_a_reboot_is_removed_with_the_attachment(node: Node) -> None:
    node.plugin("note", NOTE)
    node.configure({"type": "note"})
    pod = node.host.pod()
    await node.attach(pod)
    # A reboot removes the mount from the name's file, which stays if it is on a disk.
    umount2(node.name_of(pod), MNT_DETACH)
    assert Path(node.name_of(pod)).is_file()
    await node.network.detach(pod.id)
    assert node.log().split("\n")[1] == "DEL "
    assert clean(node)


async def test_a_pod_of_an_earlier_version_gets_the_path_at_its_new_shim(node: Node) -> None:
    """The earlier server made no name: ADD got the path /proc/SHIM/fd/N. When another shim has
    taken over, DEL gets the path at that shim."""
    node.plugin("note", NOTE)
    node.configure({"type": "note"})
    pod = node.host.pod()
    await node.attach(pod)
    names.remove(node.name_of(pod))
    record = node.folder / "state" / f"{pod.id}.json"
    record.write_text(record.read_text().replace(node.name_of(pod), "/proc/7/fd/9"))
    node.restart()
    await node.network.update_path(pod.id, pod.path)
    node.restart()
    assert json.loads(record.read_text())["netns_path"] == pod.path
    result = await node.network.result_of(pod.id)
    assert result is not None and [i["sandbox"] for i in result.raw["interfaces"]] == [pod.path]
    await node.network.detach(pod.id, pod.path)
    assert node.log().split("\n")[1] == f"DEL {pod.path}"
    assert clean(node)


async def test_a_name_without_an_attachment_is_removed(node: Node) -> None:
    """If the server is killed after making the namespace's name and before writing the record,
    detaching removes the name, and the pod can still be attached."""
    pod = node.host.pod()
    names.NamespaceNames(str(node.folder / "netns")).make(pod.id, pod.path)
    node.restart()
    await node.network.detach(pod.id)
    assert clean(node)
    names.NamespaceNames(str(node.folder / "netns")).make(pod.id, pod.path)
    node.plugin("note", NOTE)
    node.configure({"type": "note"})
    await node.attach(pod)
    assert is_of(node.name_of(pod), pod)
    await node.network.detach(pod.id)
    assert clean(node)


async def test_a_failed_add_leaves_no_name(node: Node) -> None:
    node.plugin("note", f'echo "$CNI_COMMAND $CNI_NETNS" >>$LOG; {ADD_ONLY}; exit 1')
    node.configure({"type": "note"})
    pod = node.host.pod()
    with pytest.raises(PeerError):
        await node.attach(pod)
    assert node.log().split("\n")[:-1] == [
        f"{command} {node.name_of(pod)}" for command in ("ADD", "DEL")
    ]
    assert clean(node)


async def test_the_error_names_a_folder_that_cannot_be_made(node: Node) -> None:
    (node.folder / "netns").write_text("")
    pod = node.host.pod()
    with pytest.raises(KernelError, match=r"netns/.*name of a network namespace: ENOTDIR"):
        await node.attach(pod)
    (node.folder / "netns").unlink()
    await until(lambda: clean(node))
