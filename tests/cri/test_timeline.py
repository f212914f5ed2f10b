"""Tests `pyrunc-cri timeline`: a pod's life with its steps, also when the pod is gone and the
server was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cri.client_verbs import local_cli, local_command_line
from tests.cri.server_harness import REPOSITORY, Server, server_fixture
from tests.support.processes import wait_until

server = server_fixture("module")


def run(server: Server, *words: str, code: int = 0) -> str:
    done = local_cli(server, "timeline", *words, code=code)
    return (done.stdout or done.stderr).decode()


def calls(server: Server, *words: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(run(server, *words, "--json"))
    return entries


def test_the_timeline_lists_the_calls_of_a_pods_life(server: Server) -> None:
    pod = server.run_pod(server.pod_config("life"))
    container = server.launch(pod)
    server.stop_container(container)
    server.stop_pod(pod)
    server.stop_pod(pod)
    server.remove_pod(pod)
    entries = calls(server, "default/life")
    names = [call["call"] for call in entries]
    assert names[:3] == ["RunPodSandbox", "CreateContainer", "StartContainer"]
    assert {"StopContainer", "container ended", "RemovePodSandbox"} < set(names)
    assert names.count("StopPodSandbox") == 1, "a call without effect is not recorded"
    ran = entries[0]
    assert ran["pod_id"] == pod and ran["outcome"] == "OK"
    spans = {span["name"]: span for span in ran["spans"]}
    assert {"state", "shim", "network", "record"} < set(spans) and any(
        n.startswith("plugin ") for n in spans
    )
    for span in ran["spans"]:
        assert (
            0
            <= span["offset_ms"]
            <= span["offset_ms"] + span["duration_ms"]
            <= ran["duration_ms"] + 1
        )
    assert "execute" in {span["name"] for span in entries[2]["spans"]}
    text = run(server, pod[:12])
    assert "RunPodSandbox default/life OK" in text and "█" in text and " network\n" in text
    assert "container ended default/life c exit code 137" in text


def test_the_timeline_has_failures_and_survives_the_server(server: Server) -> None:
    with Server(network=False) as server:
        server.load_image()
        pod = server.run_pod(server.pod_config("wrong"), host_network=True)
        container = server.create(pod, server.container_config(["/no/such/program"]))
        with pytest.raises(grpc.RpcError):
            server.start_container(container)
        (failed,) = [c for c in calls(server, "wrong") if c["call"] == "StartContainer"]
        assert failed["outcome"] != "OK" and failed["spans"][-1] == {
            **failed["spans"][-1],
            "name": "execute",
            "failed": True,
        }
        server.restart()
        assert [c["call"] for c in calls(server, "wrong")][:3] == [
            "RunPodSandbox",
            "CreateContainer",
            "StartContainer",
        ]
        assert " execute !\n" in run(server, "wrong")


def test_the_last_and_the_slowest_calls_are_listed(server: Server) -> None:
    for name in ("one", "two"):
        server.remove_pod(server.run_pod(server.pod_config(name)))
    assert [c["call"] for c in calls(server, "--last", "3")] == [
        "RemovePodSandbox",
        "RunPodSandbox",
        "RemovePodSandbox",
    ]
    slowest = [c["duration_ms"] for c in calls(server, "--slowest", "5")]
    assert len(slowest) == 5 and slowest == sorted(slowest, reverse=True)
    assert "the timeline has no calls for 'nobody'" in run(server, "nobody", code=1)


def parts_of(call: dict[str, Any], name: str) -> list[str]:
    """Return the names of the child spans of the call's span `name`."""
    (whole,) = [span["id"] for span in call["spans"] if span["name"] == name]
    return [span["name"] for span in call["spans"] if span.get("parent") == whole]


def test_calls_include_the_spans_of_shims(server: Server) -> None:
    pod = server.run_pod(server.pod_config("parts"))
    container = server.launch(pod, server.container_config(["sleep", "600"]))
    server.exec(container, "true")
    by_call = {call["call"]: call for call in calls(server, "default/parts")}
    server.remove_pod(pod)
    launch = ["spawn the launcher", "clone the process", "set it up and execute"]
    pause = parts_of(by_call["RunPodSandbox"], "pause")
    assert pause[-3:] == launch and "cgroup" in pause[:-3]
    assert parts_of(by_call["CreateContainer"], "launch") == ["compile"]
    compiled = parts_of(by_call["CreateContainer"], "compile")
    assert compiled[0] == "read and parse" and {"plan", "lower"} < set(compiled)
    assert parts_of(by_call["StartContainer"], "execute") == ["log and pipes", *launch, "record"]
    spans = [s["name"] for s in by_call["ExecSync"]["spans"] if "parent" not in s]
    executed = parts_of(by_call["ExecSync"], "execute")
    assert executed[:5] == ["read and parse", "plan and lower", *launch]
    # A command that ends within 10 ms is a part of the first span.
    assert (spans, executed[5:]) in (
        (["execute"], ["command"]),
        (["execute", "command"], []),
    )
    for call in by_call.values():
        ends = {
            span["id"]: span["offset_ms"] + span["duration_ms"] for span in call.get("spans", ())
        }
        for span in call.get("spans", ()):
            assert span["duration_ms"] >= 0
            if "parent" in span:
                assert ends[span["id"]] <= ends[span["parent"]] + 0.5, (call, span)


def test_operations_of_the_launcher_are_listed_on_request(tmp_path: Path) -> None:
    with Server(network=False, settings={"timeline": {"operations": True}}) as server:
        server.load_image()
        pod = server.run_pod(server.pod_config("deep"), host_network=True)
        container = server.launch(pod, server.container_config(["sleep", "600"]))
        server.exec(container, "sh", "-c", "echo secret")
        by_call = {call["call"]: call for call in calls(server, "deep")}
        for call, line in (
            ("RunPodSandbox", "pivot_root"),
            ("StartContainer", "mount 'proc' on '/proc' (nosuid,nodev,noexec)"),
            ("ExecSync", "setns 'container' namespaces mnt"),
        ):
            named = [s for s in by_call[call]["spans"] if line in s["name"]]
            assert len(named) == 1 and "parent" in named[0], by_call[call]
            numbers = [
                int(s["name"].split()[0])
                for s in by_call[call]["spans"]
                if s["name"].split()[0].isdigit()
            ]
            assert sorted(numbers) == list(range(1, len(numbers) + 1)), (
                "each line of the plan is there once"
            )
        assert "secret" not in json.dumps(by_call)
        page = tmp_path / "page.html"
        assert run(server, "deep", "--html", str(page)) == ""
        text = page.read_text()
        assert (
            text.startswith("<!DOCTYPE html>")
            and "Timeline of deep" in text
            and "pivot_root" in text
        )
        assert run(server, "deep", "--html", "-") == text
        assert "the timeline has no calls" in run(
            server, "nobody", "--html", str(tmp_path / "none"), code=1
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html"]
        server._settings["timeline"]["operations"] = False
        server._write_config()
        os.kill(server.pid, signal.SIGHUP)

        def has_operations() -> bool:
            server.exec(container, "true")
            names = [span["name"] for span in calls(server, "deep", "--last", "1")[0]["spans"]]
            assert "set it up and execute" in names
            return any("setns" in name for name in names)

        assert wait_until(lambda: not has_operations(), 60), "a running server applies the setting"


def test_a_follower_sees_calls_across_a_restart() -> None:
    with Server(network=False) as server:
        server.load_image()
        server.run_pod(server.pod_config("one"), host_network=True)
        with subprocess.Popen(
            local_command_line(server, "timeline", "--follow", "--json"),
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as follower:  # fmt: skip
            assert follower.stdout is not None and follower.stderr is not None
            lines = iter(follower.stdout)
            try:
                assert json.loads(next(lines))["call"] == "LoadImage"
                assert json.loads(next(lines))["pod"] == "default/one", (
                    "the stored calls come first"
                )
                server.run_pod(server.pod_config("two"), host_network=True)
                assert json.loads(next(lines))["pod"] == "default/two"
                server.kill()
                assert "waiting for the server" in follower.stderr.readline()
                server.start()
                server.run_pod(server.pod_config("three"), host_network=True)
                assert json.loads(next(lines))["pod"] == "default/three", (
                    "no call is repeated or missing"
                )
                follower.send_signal(signal.SIGINT)
                assert follower.wait(30) == 130
            finally:
                follower.kill()
    assert "--follow and --html exclude each other" in run(
        server, "--follow", "--html", "x", code=2
    )
