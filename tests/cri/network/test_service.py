"""Tests attaching and detaching pods with builtin and foreign CNI plugins, also when these fail."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from cni_plugins.net import host_rules
from cri_server.network.attachments import Attachment, Attachments
from cri_server.network.model import PortMapping
from pyrunc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PeerError,
    ResourceExhausted,
    WrongState,
)
from tests.cri.network.conftest import ADD_ONLY, RESULT, Node, clean, until
from tests.kernel.cni.harness import all_elements, delete_link, link_names, listen, nft, reach

# the ordinary life


@pytest.mark.requirement("3.1.2")
async def test_a_pod_has_addresses_loopback_and_a_route_out(node: Node) -> None:
    pod = node.host.pod()
    result = await node.attach(pod)
    assert result.ips == ("10.85.0.2", "fd85::2")
    assert result.raw["ips"][0]["gateway"] == "10.85.0.1"
    with listen(pod.fd, "127.0.0.1", 80) as server:
        assert reach(pod.fd, "127.0.0.1", 80, server) == "127.0.0.1"
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(None, "10.85.0.2", 80, server) == "10.85.0.1"
    await node.check(pod.id)
    await node.network.detach(pod.id, pod.path)
    pod.close()
    await until(lambda: clean(node))


async def test_an_attachment_may_be_used_before_its_record_is_on_disk(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), Attachments.write

    def slow(self: Attachments, attachment: Attachment) -> None:
        assert gate.wait(30)
        write(self, attachment)

    monkeypatch.setattr(Attachments, "write", slow)
    pod, other = node.host.pod(), node.host.pod()
    assert (await node.attach(pod, durable=False)).ips == ("10.85.0.2", "fd85::2")
    assert (await node.attach(other, durable=False)).ips == ("10.85.0.3", "fd85::3")
    with pytest.raises(AlreadyExists):
        await node.attach(pod)
    # the collection of leftovers spares an address that is in no record yet
    assert not await node.network.reconcile(lambda: [pod.id, other.id])
    third = node.host.pod()
    assert (await node.attach(third, durable=False)).ips == ("10.85.0.4", "fd85::4")
    assert not Path(f"{node.folder}/state/{pod.id}.json").exists()
    gate.set()
    await node.network.wait_written(pod.id)
    assert Path(f"{node.folder}/state/{pod.id}.json").stat().st_size
    result = await node.network.result_of(pod.id)
    assert result is not None and result.ips == ("10.85.0.2", "fd85::2")
    for each in (other, third, pod):  # the first while it is being written, perhaps
        await node.network.detach(each.id, each.path)
        each.close()
    await until(lambda: clean(node))


async def test_an_attachment_whose_record_cannot_be_written_is_detached(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Attachments, attachment: Attachment) -> None:
        raise OSError(errno.ENOSPC, "no space left", "record")

    monkeypatch.setattr(Attachments, "write", full)
    pod, other, third = node.host.pod(), node.host.pod(), node.host.pod()
    await node.attach(pod, durable=False)
    with pytest.raises(ResourceExhausted):
        await node.network.wait_written(pod.id)
    await node.network.detach(pod.id, pod.path)
    await node.attach(other, durable=False)
    await node.network.detach(other.id, other.path)
    with pytest.raises(ResourceExhausted):
        await node.attach(third)
    for each in (pod, other, third):
        each.close()
    await until(lambda: clean(node))


@pytest.mark.requirement("3.1.7")
async def test_host_ports_lead_to_the_pod(node: Node) -> None:
    await asyncio.to_thread(node.host.connect_outside)
    pod = node.host.pod()
    await node.attach(
        pod, port_mappings=(PortMapping(8080, 80), PortMapping(0, 81), PortMapping(8053, 53, "udp"))
    )
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(node.host.outside, "192.0.2.1", 8080, server) == "192.0.2.2"
        assert reach(None, "127.0.0.1", 8080, server) == "10.85.0.1"
    with listen(pod.fd, "0.0.0.0", 53, socket.SOCK_DGRAM) as server:
        assert reach(node.host.outside, "192.0.2.1", 8053, server) == "192.0.2.2"
    await node.network.detach(pod.id, pod.path)
    assert all_elements() == []


@pytest.mark.requirement("3.1.8", "3.1.9")
async def test_plugins_get_arguments_and_capabilities(node: Node) -> None:
    node.plugin("spy", f"cat >>$LOG; echo >>$LOG; env >>$LOG; {ADD_ONLY}; echo '{RESULT}'")
    node.configure(
        {"type": "spy", "capabilities": {"portMappings": True, "bandwidth": True, "dns": True}}
    )
    pod = node.host.pod()
    result = await node.attach(
        pod,
        port_mappings=(PortMapping(8080, 80, "tcp", "127.0.0.1"),),
        annotations={"kubernetes.io/ingress-bandwidth": "10M"},
    )
    assert result.ips == ("10.9.9.9",)
    log = node.log()
    for line in (
        "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;"
        "K8S_POD_INFRA_CONTAINER_ID=pod0;K8S_POD_UID=u-1",
        "CNI_IFNAME=eth0",
        f"CNI_NETNS={node.name_of(pod)}",
        f"CNI_PATH={node.folder}/bin:{node.folder}/state/bin",
    ):
        assert line in log.splitlines()
    runtime_config = json.loads(log[: log.rindex("}") + 1])["runtimeConfig"]
    assert runtime_config == {
        "portMappings": [
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "127.0.0.1"}
        ],
        "bandwidth": {
            "ingressRate": 10_000_000,
            "ingressBurst": 4294967295,
            "egressRate": 0,
            "egressBurst": 0,
        },
    }
    await node.network.detach(pod.id, pod.path)


@pytest.mark.requirement("3.2.2")
async def test_detach_is_idempotent_and_accepts_unknown_sandboxes(node: Node) -> None:
    pod = node.host.pod()
    await node.attach(pod)
    for _ in range(2):
        await node.network.detach(pod.id, pod.path)
    await node.network.detach("stranger")
    with pytest.raises(InvalidArgument):
        await node.network.detach("../stranger")


async def test_a_second_attach_is_refused(node: Node) -> None:
    pod = node.host.pod()
    first = await node.attach(pod)
    with pytest.raises(AlreadyExists):
        await node.attach(pod)
    assert await node.network.result_of(pod.id) == first
    await node.check(pod.id)


# misbehaviour of plugins

HOSTILE = {
    "says nothing": "",
    "garbage": "echo garbage",
    "a list": "echo '[]'",
    "deep": "python3 -c 'print(\"[\" * 200000)'",
    "huge": "head -c 100000000 /dev/zero",
    "wrong version": 'echo \'{"cniVersion":"9.0.0"}\'',
    "no address": 'echo \'{"cniVersion":"1.1.0"}\'',
    "address elsewhere": (
        'echo \'{"cniVersion":"1.1.0","interfaces":[{"name":"cni0","sandbox":"/elsewhere"}],'
        '"ips":[{"address":"10.0.0.1/8","interface":0}]}\''
    ),
    "interface path": 'echo \'{"cniVersion":"1.1.0","interfaces":[{"name":"../../x"}]}\'',
    "300 addresses": (
        "python3 -c 'import"
        ' json;print(json.dumps({"cniVersion":"1.1.0","ips":[{"address":"10.0.0.1/8"}]*300}))\''
    ),
    "exit 0 with an error": 'echo \'{"cniVersion":"1.1.0","code":7,"msg":"no"}\'',
    "exit 1 with a result": f"echo '{RESULT}'; exit 1",
    "exit 1 with an error": (
        'echo \'{"cniVersion":"1.1.0","code":11,"msg":"later","details":"much"}\'; exit 1'
    ),
    "killed": "kill -9 $$",
    "not executable format": None,
}


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_plugin_that_misbehaves_fails_the_add_and_nothing_stays(
    node: Node, script: str | None
) -> None:
    path = node.plugin("bad", f"{ADD_ONLY}; {script}")
    if script is None:
        path.write_bytes(b"\x7fELF nonsense")
    node.configure(node.bridge(), {"type": "bad"})
    pod = node.host.pod()
    if script is None:
        with pytest.raises(PeerError):
            await node.attach(pod)
        path.write_text("#!/bin/sh\n")  # its DEL cannot run either until it is repaired
        assert node.recorded() == {pod.id}
        await node.network.detach(pod.id, pod.path)
    else:
        with pytest.raises(PeerError):
            await node.attach(pod)
    pod.close()
    await until(lambda: clean(node))


@pytest.mark.parametrize(
    "script",
    [
        "sleep 1000",
        f"echo '{RESULT}'; sleep 1000",
        f"sleep 1000 & echo '{RESULT}'; sleep 1000",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
    ],
)
async def test_a_plugin_that_hangs_is_killed_at_the_deadline_with_its_children(
    node: Node, script: str
) -> None:
    node.restart(timeout_s=0.5)
    node.plugin("slow", f"{ADD_ONLY}; {script}")
    node.configure(node.bridge(), {"type": "slow"})
    pod = node.host.pod()
    with pytest.raises(DeadlineExceeded):
        await node.attach(pod)
    pod.close()
    await until(lambda: clean(node))


async def test_a_child_that_keeps_stdout_open_does_not_delay_the_answer(node: Node) -> None:
    node.plugin("forker", f"{ADD_ONLY}; sleep 1000 & echo '{RESULT}'")
    node.configure({"type": "forker"})
    started = time.monotonic()
    assert (await node.attach(node.host.pod())).ips == ("10.9.9.9",)
    assert time.monotonic() - started < 20  # before the time limit of a plugin


@pytest.mark.requirement("3.2.2")
async def test_a_failing_del_keeps_the_attachment_for_a_retry(node: Node) -> None:
    node.plugin("stubborn", f"{ADD_ONLY.replace('exit 0', 'exit 3')}; cat >$LOG; echo '{RESULT}'")
    node.configure({"type": "stubborn"})
    pod = node.host.pod()
    await node.attach(pod)
    for _ in range(2):
        with pytest.raises(PeerError, match="failed DEL with exit code 3"):
            await node.network.detach(pod.id, pod.path)
        assert node.recorded() == {pod.id}
    assert any("failed DEL" in line for line in await node.network.reconcile(list))
    node.plugin("stubborn", "exit 0")
    await node.network.detach(pod.id, pod.path)
    assert node.recorded() == set()


async def test_a_failed_roll_back_is_reported_and_retried(node: Node) -> None:
    node.plugin("broken", "exit 3")
    node.configure(node.bridge(), {"type": "broken"})
    pod = node.host.pod()
    with pytest.raises(PeerError) as refused:
        await node.attach(pod)
    assert any("roll-back failed too" in note for note in refused.value.__notes__)
    assert node.recorded() == {pod.id} and node.leases()
    node.plugin("broken", "exit 0")
    assert await node.network.reconcile(list) == []
    assert not node.recorded() and not node.leases() and not all_elements()


async def test_a_missing_plugin_is_reported(node: Node) -> None:
    node.configure(node.bridge(), {"type": "cilium"})
    assert "CNI plugin 'cilium' is not in" in (await node.network.status()).message
    with pytest.raises(WrongState, match="cilium"):
        await node.attach(node.host.pod())


async def test_a_plugin_of_the_new_folder_runs_after_a_reload(node: Node) -> None:
    node.configure({"type": "cilium"})
    other = node.folder / "other-bin"
    other.mkdir()
    node.plugin("cilium", "true").rename(other / "cilium")
    assert not (await node.network.status()).ready
    node.network.reconfigure(str(node.folder / "conf"), str(other), None)
    assert (await node.network.status()).ready


async def test_exhausted_addresses_are_resource_exhausted(node: Node) -> None:
    ipam = {
        "type": "host-local",
        "dataDir": str(node.folder / "leases"),
        "ranges": [[{"subnet": "10.88.0.0/30"}]],
    }
    node.configure(node.bridge(ipam=ipam))
    await node.attach(node.host.pod())
    with pytest.raises(ResourceExhausted, match="no address left"):
        await node.attach(node.host.pod())


@pytest.mark.parametrize("name", ["a;K8S_POD_UID=x", "a\nb", "a=b", "a" * 2000, "a\0b"])
async def test_pod_names_that_cni_args_cannot_represent_are_refused(node: Node, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await node.attach(node.host.pod(), name=name)
    assert clean(node)


async def test_a_missing_namespace_is_refused(node: Node) -> None:
    pod = node.host.pod()
    pod.close()
    with pytest.raises(NotFound):
        await node.attach(pod)


# between ADD and DEL


async def test_del_uses_the_configuration_of_the_add(node: Node) -> None:
    node.configure(node.bridge(), name="first")
    pod = node.host.pod()
    await node.attach(pod)
    node.configure(node.bridge(bridge="cni9"), name="second")
    await node.network.detach(pod.id, pod.path)
    assert not node.leases() and not all_elements()
    other = node.host.pod()
    await node.attach(other)
    os.unlink(node.folder / "conf" / "10-net.conflist")
    await node.network.detach(other.id, other.path)
    assert not node.leases() and not all_elements()


async def test_a_restarted_service_knows_all_attachments(node: Node) -> None:
    pod = node.host.pod()
    result = await node.attach(pod, port_mappings=(PortMapping(8080, 80),))
    node.restart()
    assert await node.network.result_of(pod.id) == result
    await node.check(pod.id)
    assert await node.network.reconcile(lambda: [pod.id]) == []
    await node.network.detach(pod.id, None)
    assert await node.network.result_of(pod.id) is None and not all_elements()


async def test_reconcile_detaches_dead_pods_and_collects_leftovers(node: Node) -> None:
    live, dead, lost = node.host.pod(), node.host.pod(), node.host.pod()
    for pod in (live, dead, lost):
        await node.attach(pod, port_mappings=(PortMapping(8080 + int(pod.id[-1]), 80),))
    os.unlink(node.folder / "state" / f"{lost.id}.json")  # its record is gone, its leases are not
    node.restart()
    assert await node.network.reconcile(lambda: [live.id]) == []
    assert node.recorded() == {live.id}
    assert {e.comment.rsplit("/", 1)[0] for e in all_elements()} == {f"pyrunc/{live.id}/eth0"}
    assert len(node.leases()) == 2
    await node.check(live.id)


async def test_reconcile_keeps_a_pod_that_is_attached_meanwhile(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, living = node.host.pod(), list[str]()
    attachments, loop = node.network._attachments, asyncio.get_running_loop()

    def read_late() -> tuple[list[Attachment], list[str]]:
        monkeypatch.undo()
        living.append(pod.id)
        asyncio.run_coroutine_threadsafe(node.attach(pod), loop).result(60)
        return attachments.all()

    monkeypatch.setattr(attachments, "all", read_late)
    assert await node.network.reconcile(lambda: living) == []
    assert node.recorded() == {pod.id} and node.leases()


async def test_lost_rules_are_restored(node: Node) -> None:
    pod = node.host.pod()
    await node.attach(pod, port_mappings=(PortMapping(8080, 80),))
    before = set(all_elements())
    for damage in (
        ("flush", "ruleset"),
        ("flush", "chain", "inet", "pyrunc_cni", "to_pod"),
        ("flush", "map", "inet", "pyrunc_cni", "ports4"),
    ):
        nft(*damage)
        assert await node.network.reconcile(lambda: [pod.id]) == []
        assert set(all_elements()) == before and host_rules.is_intact()
        with listen(pod.fd, "0.0.0.0", 80) as server:
            reach(None, "127.0.0.1", 8080, server)
    nft("flush", "ruleset")
    other = node.host.pod()
    # the next pod heals the rules too
    await node.attach(other, port_mappings=(PortMapping(8081, 80),))
    assert host_rules.is_intact()


@pytest.mark.parametrize(
    "damage", ["namespace", "veth", "bridge", "table", "lease", "reused namespace"]
)
async def test_a_damaged_pod_can_be_detached(node: Node, damage: str) -> None:
    pod = node.host.pod()
    await node.attach(pod, port_mappings=(PortMapping(8080, 80),))
    path: str | None = pod.path
    if damage == "namespace":
        pod.close()
    elif damage == "table":
        nft("flush", "ruleset")
    elif damage == "lease":
        for lease in node.folder.glob("leases/*/*"):
            lease.unlink() if lease.is_file() else None
    elif damage == "reused namespace":
        path = node.host.pod().path
    else:
        name = (
            "cni0" if damage == "bridge" else next(n for n in link_names() if n.startswith("veth"))
        )
        await asyncio.to_thread(delete_link, name)
    await node.network.detach(pod.id, path)
    pod.close()
    await until(lambda: clean(node))


async def test_a_cancelled_attach_is_rolled_back_at_every_moment(node: Node) -> None:
    await node.attach(node.host.pod("first"))  # bridge and table exist
    for number in range(30):
        pod = node.host.pod(f"c{number}")
        task = asyncio.ensure_future(node.attach(pod, port_mappings=(PortMapping(8080, 80),)))
        await asyncio.sleep(number * 0.0006)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert node.recorded() == {"first"}
        else:
            await node.network.detach(pod.id, pod.path)
        pod.close()
    await until(lambda: len([n for n in link_names() if n.startswith("veth")]) == 1)
    assert {e.comment.rsplit("/", 1)[0] for e in all_elements()} == {"pyrunc/first/eth0"}
    assert len(node.leases()) == 2


async def test_a_killed_zygote_fails_the_attach_and_the_next_attach_succeeds(node: Node) -> None:
    node.plugin("slow", f"{ADD_ONLY}; sleep 1000")
    node.configure(node.bridge(), {"type": "slow"})
    pod = node.host.pod()
    task = asyncio.ensure_future(node.attach(pod))
    await until(lambda: bool(node.leases()))
    assert node.zygote.pid is not None
    os.kill(node.zygote.pid, signal.SIGKILL)
    with pytest.raises(PeerError):
        await task
    assert node.recorded() == set() and not node.leases()
    node.configure(node.bridge())
    assert (await node.attach(pod)).ips


# readiness


@pytest.mark.requirement("10.5.1")
async def test_the_network_is_ready_with_a_usable_configuration(node: Node) -> None:
    assert (await node.network.status()).ready  # the built-in network
    node.network.reconfigure(str(node.folder / "conf"), str(node.folder / "bin"), None)
    unready = await node.network.status()
    assert (
        not unready.ready
        and unready.reason == "NetworkPluginNotReady"
        and "no network configuration" in unready.message
    )
    with pytest.raises(WrongState, match="no network configuration"):
        await node.attach(node.host.pod())
    (node.folder / "conf" / "10-bad.conflist").write_text("{")
    assert "10-bad.conflist" in (await node.network.status()).message
    node.configure(node.bridge(), file="20-good.conflist")
    assert "10-bad.conflist" in (await node.network.status()).message
    (node.folder / "conf" / "10-bad.conflist").unlink()
    assert (await node.network.status()).ready
    node.plugin(
        "moody",
        '[ "$CNI_COMMAND" != STATUS ] || { echo \'{"cniVersion":"1.1.0","code":50,"msg":"not'
        " yet\"}'; exit 1; }",
    )
    node.configure({"type": "moody"}, file="15-moody.conflist")
    unready = await node.network.status()
    assert not unready.ready and "not yet" in unready.message
    node.plugin("moody", "exit 0")
    started = time.monotonic()
    while not (await node.network.status()).ready:
        assert time.monotonic() - started < 60, "the old answer is kept too long"
        await asyncio.sleep(0.1)


async def test_status_and_the_log_name_the_file_that_decides(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.configure({"type": "nowhere"})
    node.configure(node.bridge(), name="broken", file="05-broken.conflist", cniVersion="0.9.0")
    path = f"{node.folder}/conf/05-broken.conflist"
    for _ in range(3):
        ready = await node.network.status()
        assert not ready.ready and path in ready.message and "'0.9.0'" in ready.message
    (node.folder / "conf/05-broken.conflist").write_text("")
    assert (
        (await node.network.status()).message
        == f"{node.folder}/conf/10-net.conflist: CNI plugin 'nowhere' is not in {node.folder}/bin"
    )
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        path,
        f"{path} is skipped",
    ]


@pytest.mark.parametrize("ipam", [False, True])
async def test_a_missing_plugin_leaves_nothing_to_detach(node: Node, ipam: bool) -> None:
    """Without a search for all plugins before ADD, the server would write a record whose DEL could
    only fail."""
    missing = {"ipam": {"type": "nowhere"}} if ipam else {}
    node.configure(node.bridge(**missing), *([] if ipam else [{"type": "nowhere"}]))
    pod = node.host.pod()
    with pytest.raises(WrongState, match=r"10-net\.conflist: CNI plugin 'nowhere' is not in"):
        await node.attach(pod)
    assert clean(node)
