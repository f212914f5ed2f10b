"""Tests AppArmor and user namespaces: the kernel's view of the processes, and the actions that they
are refused."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.kube.pods import pod, shell
from tests.support import cri
from tests.vm.kubelet.api import Json
from tests.vm.kubelet.node import Node

DEFAULT = "cri-pyrunc-default"
LOCAL = "pyrunc-test-no-writing"
POLICY = f"""profile {LOCAL} flags=(attach_disconnected,mediate_deleted) {{
  file,
  capability,
  network,
  signal,
  deny /forbidden/** wl,
}}
"""
# With CAP_SYS_ADMIN and no seccomp, only AppArmor can refuse these.
TRY = (
    "mkdir -p /t /forbidden; mount -t tmpfs t /t && echo mounted >>/made; echo x >/forbidden/x &&"
    " echo wrote >>/made; touch /made; exec sleep 3600"
)
MIGHTY: Json = {"capabilities": {"add": ["SYS_ADMIN"]}, "seccompProfile": {"type": "Unconfined"}}
SECURITY_CONTEXTS: dict[str, Json] = {
    "said-nothing": {},
    "default": {"appArmorProfile": {"type": "RuntimeDefault"}},
    "local": {"appArmorProfile": {"type": "Localhost", "localhostProfile": LOCAL}},
    "unconfined": {"appArmorProfile": {"type": "Unconfined"}},
}
LABELS = {
    "said-nothing": f"{DEFAULT} (enforce)",
    "default": f"{DEFAULT} (enforce)",
    "local": f"{LOCAL} (enforce)",
    "unconfined": "unconfined",
}
MADE = {"said-nothing": "wrote", "default": "wrote", "local": "", "unconfined": "mounted wrote"}


@pytest.fixture(scope="module")
def confined(node: Node) -> Iterator[Json]:
    """Provide a pod with a container for each of `SECURITY_CONTEXTS`."""
    subprocess.run(
        ["apparmor_parser", "--replace", "--skip-cache"], input=POLICY.encode(), check=True
    )
    containers = [
        {"name": n, **shell(TRY, securityContext={**MIGHTY, **context})}
        for n, context in SECURITY_CONTEXTS.items()
    ]
    try:
        yield node.run(pod("confined", *containers))
    finally:
        node.remove("confined")


@pytest.mark.parametrize("name", SECURITY_CONTEXTS)
def test_the_kernel_shows_the_profile_of_a_container(node: Node, confined: Json, name: str) -> None:
    pid = node.main_pid(confined, name)
    assert Path(f"/proc/{pid}/attr/apparmor/current").read_text().strip() == LABELS[name]


@pytest.mark.requirement("8.9")
@pytest.mark.parametrize("name", SECURITY_CONTEXTS)
def test_a_container_cannot_do_forbidden_actions_of_its_profile(
    node: Node, confined: Json, name: str
) -> None:
    path = Path(f"/proc/{node.main_pid(confined, name)}/root/made")
    node.until(path.exists, f"{name} to have tried")
    assert path.read_text().split() == MADE[name].split()


@pytest.mark.requirement("8.9")
def test_an_exec_is_confined_like_its_container(node: Node, confined: Json) -> None:
    with cri.connect(node.socket) as client:
        for name in ("default", "local"):
            request = api.ExecSyncRequest(
                container_id=node.container_id(confined, name),
                cmd=["cat", "/proc/self/attr/apparmor/current"],
                timeout=60,
            )
            assert (
                client.runtime.ExecSync(request, timeout=120).stdout.decode().strip()
                == LABELS[name]
            )


@pytest.mark.requirement("8.9")
def test_an_error_names_a_profile_that_is_not_loaded(node: Node, removing: list[str]) -> None:
    removing.append("absent")
    context = {"appArmorProfile": {"type": "Localhost", "localhostProfile": "no-such-profile"}}
    node.create(pod("absent", shell("sleep 3600", securityContext=context)))
    node.until(
        lambda: [e for e in node.events("absent") if "no-such-profile" in e],
        "the refusal",
        "absent",
    )


def test_user_namespaces_separate_pods(node: Node, removing: list[str]) -> None:
    """Root in a pod is an ordinary user of the host, every pod has other ids, and files in the
    image and on the volume belong to the pod's users."""
    removing += ["mapped", "mapped-too"]
    volume = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    script = (
        "touch /mine /v/mine; stat -c %u:%g /bin/busybox /mine /v/mine >/facts; id -u >>/facts;"
        " exec sleep 3600"
    )
    manifests = [
        pod(name, shell(script, **volume), hostUsers=False, volumes=[{"name": "v", "emptyDir": {}}])
        for name in removing
    ]
    node.create(*manifests)
    firsts = []
    for name in removing:
        pid = node.main_pid(node.ready(name))
        inside, outside, length = map(int, Path(f"/proc/{pid}/uid_map").read_text().split())
        assert (inside, length) == (0, 65536)
        assert outside >= 65536
        assert Path(f"/proc/{pid}").stat().st_uid == outside
        root = Path(f"/proc/{pid}/root")
        assert (root / "facts").read_text().split() == ["0:0", "0:0", "0:0", "0"]
        firsts.append(outside)
    assert abs(firsts[0] - firsts[1]) >= 65536
