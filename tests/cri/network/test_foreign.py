"""Tests foreign CNI plugins that run before, after or instead of pyrunc's own, or call them."""

from __future__ import annotations

import json
import time

import pytest

from cni_plugins.net import netns
from cri_server.network.attachments import Attachment, Attachments
from cri_server.network.model import PortMapping
from pyrunc.errors import PeerError
from tests.cri.network.conftest import ADD_ONLY, RESULT, Node, clean, until
from tests.kernel.cni.harness import all_elements, listen, reach
from tests.unit.cni.peer_results import NETNS, PEER_RESULTS


async def test_a_foreign_plugin_behind_ours_sees_the_result(node: Node) -> None:
    node.plugin(
        "tune",
        f"cat >$LOG; {ADD_ONLY}; python3 -c 'import"
        ' json;print(json.dumps(json.load(open("\'$LOG\'"))["prevResult"]))\'',
    )
    node.configure(
        node.bridge(), {"type": "tune"}, {"type": "portmap", "capabilities": {"portMappings": True}}
    )
    pod = node.host.pod()
    assert (await node.attach(pod, port_mappings=(PortMapping(8080, 80),))).ips == ("10.88.0.2",)
    await node.check(pod.id)
    await node.network.detach(pod.id, pod.path)
    assert all_elements() == []


async def test_every_add_ons_result_gives_addresses_and_reaches_later_plugins_and_del(
    node: Node,
) -> None:
    # The plugins record their input of each command; the first returns the result of an add-on.
    keep = f'cat >"{node.folder}/$CNI_COMMAND.$1"; [ $CNI_COMMAND = ADD ] || exit 0'
    node.plugin("add-on", f"set -- first; {keep}; sed s:{NETNS}:$CNI_NETNS: {node.folder}/answer")
    handed = "python3 -c 'import json,sys;print(json.dumps(json.load(sys.stdin)[\"prevResult\"]))'"
    node.plugin("later", f"set -- later; {keep}; {handed} <{node.folder}/ADD.later")
    for peer in PEER_RESULTS:
        (node.folder / "answer").write_text(json.dumps(peer.answer))
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        node.configure({"type": "add-on"}, ports, {"type": "later"}, cniVersion=peer.cni_version)
        pod = node.host.pod()
        result = await node.attach(pod, port_mappings=(PortMapping(8080, 80),))
        assert result.ips == peer.ips, peer.name
        node.restart()
        assert (await node.network.result_of(pod.id)).ips == peer.ips, peer.name  # type: ignore[union-attr]
        await node.network.detach(pod.id, pod.path)
        answer = peer.answer_in(node.name_of(pod))
        for name in ("ADD.later", "DEL.later", "DEL.first"):
            plugin_input = json.loads((node.folder / name).read_text())
            if peer.cni_version < "0.4.0" and name.startswith("DEL"):
                assert "prevResult" not in plugin_input
                continue
            previous = plugin_input["prevResult"]
            assert previous["cniVersion"] == peer.cni_version, peer.name
            if (answer.get("cniVersion") or peer.cni_version) == peer.cni_version:
                assert previous == {**answer, "cniVersion": peer.cni_version}, peer.name
            if "interfaces" in previous and answer["interfaces"]:
                assert [i["name"] for i in previous["interfaces"]] == [
                    i["name"] for i in answer["interfaces"]
                ]
                assert [i.get("mac") for i in previous["interfaces"]] == [
                    i.get("mac") for i in answer["interfaces"]
                ]


async def test_a_list_of_the_first_versions_runs_ours_and_foreign_plugins(node: Node) -> None:
    node.plugin("tune", f"cat >$LOG; {ADD_ONLY}; cat $LOG | sed 's/.*\"prevResult\": //; s/}}$//'")
    # "" is version 0.1.0, as in libcni; these results have one address of each family.
    for old in ("0.2.0", ""):
        node.configure(
            node.bridge(),
            {"type": "tune"},
            {"type": "portmap", "capabilities": {"portMappings": True}},
            cniVersion=old,
        )
        pod = node.host.pod()
        (ip,) = (await node.attach(pod, port_mappings=(PortMapping(8080, 80),))).ips
        assert json.loads(node.log())["prevResult"]["ip4"]["ip"] == f"{ip}/16"
        await node.network.detach(pod.id, pod.path)
    assert all_elements() == []


async def test_a_foreign_plugin_runs_when_its_attachment_is_on_the_disk(node: Node) -> None:
    """The record is synced before the first ADD, so that after a power cut DEL can still remove the
    plugin's state."""
    node.plugin("first", f"ls -s {node.folder}/state >>$LOG; {ADD_ONLY}; echo '{RESULT}'")
    pod, other = node.host.pod(), node.host.pod()
    synced: list[str] = []
    write = Attachments.write

    def watched(self: Attachments, attachment: Attachment) -> None:
        write(self, attachment)
        synced.append(f"{attachment.sandbox_id} {attachment.result is not None}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attachments, "write", watched)
        node.configure({"type": "first"})
        await node.attach(pod)
        assert f"{pod.id}.json" in node.log()
        assert synced == [f"{pod.id} False", f"{pod.id} True"]
        for ipam, results in (("my-ipam", (False, True)), ("host-local", (True,))):
            node.plugin("my-ipam", f'{ADD_ONLY}; echo \'{{"ips":[{{"address":"10.88.9.9/16"}}]}}\'')
            synced.clear()
            subnets = [[{"subnet": "10.88.0.0/16"}]]
            ipam_config = {"type": ipam, "dataDir": str(node.folder / "leases"), "ranges": subnets}
            node.configure(node.bridge(ipam=ipam_config))
            await node.attach(other)
            assert synced == [f"{other.id} {has_result}" for has_result in results]
            await node.network.detach(other.id, other.path)


async def test_an_executable_of_the_same_name_wins(node: Node) -> None:
    node.plugin("bridge", f"{ADD_ONLY}; echo '{RESULT}'")
    node.configure(node.bridge())
    pod = node.host.pod()
    assert (await node.attach(pod)).ips == ("10.9.9.9",)
    # loopback is up with any plugins
    with netns.entered(pod.fd), listen(pod.fd, "127.0.0.1", 80) as server:
        assert reach(pod.fd, "127.0.0.1", 80, server)


async def test_our_bridge_runs_a_foreign_address_plugin(node: Node) -> None:
    node.plugin(
        "my-ipam",
        f'echo "$CNI_COMMAND" >>$LOG; {ADD_ONLY}; echo'
        ' \'{"cniVersion":"1.1.0","ips":[{"address":"10.7.0.5/24"}]}\'',
    )
    node.configure(node.bridge(ipam={"type": "my-ipam"}))
    pod = node.host.pod()
    result = await node.attach(pod)
    assert result.ips == ("10.7.0.5",) and result.raw["ips"][0]["gateway"] == "10.7.0.1"
    await node.network.detach(pod.id, pod.path)
    assert node.log().split() == ["ADD", "DEL"]


async def test_a_bridge_that_fails_releases_the_address_of_a_foreign_plugin(node: Node) -> None:
    node.plugin(
        "my-ipam",
        f"""echo "$CNI_COMMAND" >>$LOG; {ADD_ONLY}
        echo '{{"cniVersion":"1.1.0","ips":[{{"address":"10.9.0.5/24"}}]}}'""",
    )
    node.configure(node.bridge())
    await node.attach(node.host.pod())
    node.configure(node.bridge(ipam={"type": "my-ipam"}))
    with pytest.raises(PeerError, match="forceAddress replaces the address"):
        await node.attach(node.host.pod())
    # The bridge plugin undoes its ADD; then the server rolls the whole chain back.
    assert node.log().split() == ["ADD", "DEL", "DEL"]


async def test_a_foreign_plugin_delegates_to_ours(node: Node) -> None:
    """The plugin folder contains only the foreign plugin, as with flannel. It finds pyrunc's
    plugins through CNI_PATH."""
    delegate = (
        "for d in $(echo $CNI_PATH | tr : ' '); do [ ! -x $d/bridge ] || exec $d/bridge; done;"
        " exit 9"
    )
    node.plugin("meta", f"echo $CNI_COMMAND >>$LOG; {delegate}")
    node.configure(node.bridge(type="meta"))
    pod, other = node.host.pod(), node.host.pod()
    assert (await node.attach(pod)).ips == ("10.88.0.2",)
    node.restart()
    assert (await node.attach(other)).ips == ("10.88.0.3",)
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(other.fd, "10.88.0.2", 80, server) == "10.88.0.3"
    await node.check(pod.id)
    for each in (pod, other):
        await node.network.detach(each.id, each.path)
        each.close()
    assert node.log().split() == ["ADD", "ADD", "CHECK", "DEL", "DEL"]
    await until(lambda: clean(node))


async def test_our_own_installed_executables_need_not_be_run(node: Node) -> None:
    from cni_plugins.install import install

    install(str(node.folder / "bin"))
    node.configure(node.bridge())
    started = time.monotonic()
    await node.attach(node.host.pod())
    assert time.monotonic() - started < 20
    assert not any(
        node.network._plugins._program(kind)
        for kind in ("bridge", "host-local", "portmap", "loopback")
    )


async def test_the_debug_log_has_the_stderr_of_a_plugin(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "cri_server.network.chain")
    node.plugin("talks", f"echo looking for $CNI_IFNAME >&2; {ADD_ONLY}; echo '{RESULT}'")
    node.configure({"type": "talks"})
    pod = node.host.pod()
    await node.attach(pod)
    await node.network.detach(pod.id)
    assert [
        (r.levelname, r.getMessage())
        for r in caplog.records
        if r.name == "cri_server.network.chain"
    ] == [
        ("DEBUG", f"CNI plugin talks, {command} {pod.id}: looking for eth0")
        for command in ("ADD", "DEL")
    ]
