"""Tests features that need a machine with systemd: the log in the journal, and `doctor` on a host
of pure cgroup v2."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from pyrunc.compile.host import host
from tests.cri.server_harness import REPOSITORY, Server
from tests.support.processes import wait_until


def journal(*matches: str) -> list[dict[str, Any]]:
    done = subprocess.run(["journalctl", "-o", "json", *matches], capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_records_in_the_journal_have_fields() -> None:
    with Server(network=False, settings={"server": {"log_format": "journald"}}) as server:
        pod = server.run_pod(server.pod_config("journalled"), host_network=True)
        server.remove_pod(pod)
        match = f"PYRUNC_POD_ID={pod}"
        assert wait_until(lambda: len(journal(match)) >= 2, 60)
        ran, removed = journal(match)
        assert (ran["MESSAGE"], removed["MESSAGE"]) == ("RunPodSandbox", "RemovePodSandbox")
        assert ran["PYRUNC_POD"] == "default/journalled" and ran["PYRUNC_OUTCOME"] == "OK"
        assert ran["SYSLOG_IDENTIFIER"] == "pyrunc-cri" and ran["PRIORITY"] == "6"
        assert float(ran["PYRUNC_DURATION_MS"]) > 0 and ran["_PID"] == str(server.pid)
        assert (
            ran["CODE_FILE"].endswith("verbs.py") and "RunPodSandbox" not in server.log.read_text()
        )


def test_doctor_on_a_machine_with_systemd() -> None:
    command = [sys.executable, "-m", "cri_server.cli.main", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=False)
    results = {result["code"]: result for result in json.loads(done.stdout)}
    for code in (
        "cgroup-v2",
        "cgroup-controllers",
        "cgroup-driver",
        "apparmor",
        "overlay-on-root",
        "state-tmpfs",
    ):
        assert results[code]["level"] == "fine", results[code]
    assert results["cgroup-driver"]["found"] == "systemd"
    assert results["images"]["level"] == ("fine" if host().clones_detached else "note"), results[
        "images"
    ]
    for code in ("kernel-calls", "namespaces", "seccomp", "firewall"):
        assert results[code]["level"] == "fine", results[code]
    assert done.returncode == any(result["level"] == "wrong" for result in results.values())


def test_images_are_unpacked_where_containers_cannot_share_a_mount() -> None:
    with Server(network=False) as server:
        # Debian's kernels 6.1 and 6.12. (There a server that is configured to mount images does not
        # start.)
        assert (
            "images are unpacked and not mounted: each container would have its own"
            " mount" in server.log.read_text()
        )
        server.load_image()
        images = server.root / "images"
        assert list((images / "layers").iterdir()) and not list((images / "tars").iterdir())
        container = server.launch(server.run_pod(host_network=True))
        assert "www" in server.output(container, "cat", "/etc/passwd")
