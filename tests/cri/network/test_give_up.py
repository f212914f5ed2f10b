"""Tests an ADD that fails halfway and a DEL that cannot succeed: the roll-back, its repetition, and
the forced release."""

from __future__ import annotations

import pytest

from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import PeerError
from tests.cri.network.conftest import ADD_ONLY, RESULT, Node, clean, until

HAND_ON = "python3 -c 'import json,sys;print(json.dumps(json.load(sys.stdin)[\"prevResult\"]))'"


async def test_del_calls_only_plugins_whose_add_began(node: Node) -> None:
    """Neither the roll-back nor its repetition calls plugins after the one whose ADD failed."""
    note = 'echo "$CNI_COMMAND $(basename $0)" >>$LOG'
    node.plugin("first", f"{note}; {ADD_ONLY}; echo '{RESULT}'")
    node.plugin("later", f"{note}; exit 1")
    node.plugin("fails", f"{note}; exit 1")
    node.configure({"type": "first"}, {"type": "fails"}, {"type": "later"})
    pod = node.host.pod()
    with pytest.raises(PeerError, match="CNI plugin fails failed ADD") as failed:
        await node.attach(pod)
    assert "the roll-back failed too: CNI plugin fails failed DEL" in failed.value.__notes__[0]
    node.restart()
    node.plugin("fails", note)
    await node.network.detach(pod.id)
    called = node.log().splitlines()
    assert called[:3] == ["ADD first", "ADD fails", "DEL fails"] and called[3:] == [
        "DEL fails",
        "DEL first",
    ]
    assert clean(node)


async def test_a_network_that_cannot_be_detached_is_released_with_its_errors(
    node: Node,
) -> None:
    """If one plugin is missing and another fails, `release` returns their errors, and pyrunc's
    bridge plugin releases its part."""
    node.plugin("leaves", f"{ADD_ONLY}; {HAND_ON}")
    node.plugin("refuses", f"[ $CNI_COMMAND = ADD ] || exit 3; {HAND_ON}")
    node.configure(node.bridge(), {"type": "leaves"}, {"type": "refuses"})
    pod = node.host.pod()
    await node.attach(pod)
    (node.folder / "bin/leaves").unlink()
    node.restart()
    node.configure(node.bridge())  # the file is mended, but DEL is that of the ADD
    for _ in range(2):
        with pytest.raises(PeerError, match="refuses"):
            await node.network.detach(pod.id)
    assert node.network.has_record(pod.id) and not clean(node)
    refused = await node.network.release(pod.id)
    assert [line.partition(":")[0] for line in refused] == [
        "CNI plugin refuses failed DEL with exit code 3",
        f"CNI plugin 'leaves' is not in {node.folder}/bin",
    ]
    pod.close()
    await until(lambda: clean(node))
    assert await node.network.release(pod.id) == []


async def test_a_pod_with_a_damaged_record_can_be_released(node: Node) -> None:
    node.configure(node.bridge())
    pod = node.host.pod()
    await node.attach(pod)
    node.restart()
    (node.folder / "state" / f"{pod.id}.json").write_text("{")
    with pytest.raises(DamagedRecord):
        await node.network.detach(pod.id)
    (refused,) = await node.network.release(pod.id)
    assert f"{pod.id}.json" in refused and not node.recorded() and not node.names()
    assert await node.network.reconcile(list) == []  # GC gives back what our plugins have
    pod.close()
    await until(lambda: clean(node))
