"""Tests the name of a pod's network namespace on the host, for plugins and add-ons, from the pod's
start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.cri.test_recovery import nothing_left, pid_of, shim_pid
from tests.cri.test_takeover import lose_shim, verbose_info
from tests.support.keeper import keeper_pid
from tests.support.processes import wait_until

PLUGIN = """#!/bin/sh
echo "$CNI_COMMAND $CNI_NETNS" >>{folder}/called
[ $CNI_COMMAND = ADD ] || exit 0
echo '{{"cniVersion": "1.0.0", "ips": [{{"address": "10.9.9.9/24"}}]}}'
"""


@pytest.fixture
def server() -> Iterator[Server]:
    """Provide a server whose only CNI plugin records its environment."""
    server = Server(network=False)
    server.names.mkdir()
    # The names are on a shared mount, as on a node with systemd.
    for command in (["mount", "-t", "tmpfs", "names"], ["mount", "--make-shared"]):
        subprocess.run([*command, server.names], check=True)
    try:
        with server:
            (server.folder / "bin").mkdir()
            plugin = server.folder / "bin/note"
            plugin.write_text(PLUGIN.format(folder=server.folder))
            plugin.chmod(0o755)
            conflist = '{"cniVersion": "1.0.0", "name": "noted", "plugins": [{"type": "note"}]}'
            (server.folder / "net.d/10-note.conflist").write_text(conflist)
            server.load_image()
            yield server
            server.remove_all()
            nothing_left(server)
            subprocess.run(["umount", server.names], check=True)
    finally:
        subprocess.run(["umount", "-q", server.names], check=False, capture_output=True)


def called(server: Server) -> list[str]:
    path = server.folder / "called"
    return path.read_text().splitlines() if path.exists() else []


def network_of(process: int) -> int:
    return os.stat(f"/proc/{process}/ns/net").st_ino


def test_add_and_del_get_the_same_path_of_the_namespace(server: Server) -> None:
    """The path stays the same when the pod's shim and the server are replaced in between."""
    pod = server.run_pod()
    name = f"{server.names}/{pod}"
    assert verbose_info(server, pod)["netns"] == name
    assert os.stat(name).st_ino == network_of(verbose_info(server, pod)["pid"])
    lose_shim(server, pod)
    server.restart()
    assert verbose_info(server, pod)["netns"] == name
    server.stop_pod(pod)
    # Earlier versions passed another path to DEL than to ADD.
    assert called(server) == [f"ADD {name}", f"DEL {name}"] and not os.path.lexists(name)
    server.remove_pod(pod)


def test_a_pod_with_a_user_namespace_has_a_namespace_name(server: Server) -> None:
    config = server.pod_config()
    ids = [api.IDMapping(host_id=200000, container_id=0, length=65536)]
    config.linux.security_context.namespace_options.userns_options.CopyFrom(
        api.UserNamespace(mode=api.POD, uids=ids, gids=ids)
    )
    # The pause process makes this network namespace, so that the pod's root owns it.
    pod = server.run_pod(config)
    name = f"{server.names}/{pod}"
    assert os.stat(name).st_ino == network_of(verbose_info(server, pod)["pid"])
    server.remove_pod(pod)
    assert called(server) == [f"ADD {name}", f"DEL {name}"]


def test_del_gets_the_namespace_after_server_keeper_and_shim_were_killed(server: Server) -> None:
    pod = server.run_pod()
    name, inode = f"{server.names}/{pod}", network_of(verbose_info(server, pod)["pid"])
    shim = shim_pid(server, pod)
    server.kill()
    for pid in (keeper_pid(server.state), shim):
        os.kill(pid, signal.SIGKILL)
    server.start()
    assert wait_until(lambda: server.pod_status(pod).state == api.SANDBOX_NOTREADY, 30)
    assert os.stat(name).st_ino == inode
    server.stop_pod(pod)
    assert called(server) == [f"ADD {name}", f"DEL {name}"] and not os.path.lexists(name)


# How add-ons find a pod's namespace from their own pods: the mount point of the folder, and their
# change to CNI_NETNS.
ADD_ONS = {
    "Cilium joins its last part": ("/var/run/cilium/netns", lambda name: os.path.basename(name)),
    "Istio and Antrea put /host before it": (
        "/host/var/run/netns",
        lambda name: os.path.basename(name),
    ),
    "multus' daemon uses it as it is": ("", lambda name: name),
}


@pytest.mark.parametrize("add_on", ADD_ONS)
def test_an_add_ons_pod_sees_names_appear_and_disappear(server: Server, add_on: str) -> None:
    """With mountPropagation HostToContainer, an add-on's pod sees the namespace names of later pods
    until they stop."""
    folder, of_name = ADD_ONS[add_on]
    folder = folder or str(server.names)
    mount = api.Mount(
        container_path=folder,
        host_path=str(server.names),
        readonly=True,
        propagation=api.PROPAGATION_HOST_TO_CONTAINER,
    )
    agent = server.launch(server.run_pod(), server.container_config(mounts=[mount]))
    pod = server.run_pod()
    name = called(server)[-1].removeprefix("ADD ")
    place = os.path.join(folder, of_name(name))
    inode = network_of(verbose_info(server, pod)["pid"])
    assert server.output(agent, "stat", "-L", "-c", "%i", place) == f"{inode}\n"
    assert network_of(pid_of(server, agent)) != inode
    server.stop_pod(pod)
    assert server.exec(agent, "stat", place).exit_code == 1
    assert pod not in server.output(agent, "cat", "/proc/self/mountinfo")
