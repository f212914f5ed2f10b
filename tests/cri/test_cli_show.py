"""Tests verbs that show objects: lists with filters and formats, inspect, statistics, processes,
events, logs, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.cli.main import ALIASES, COMMANDS, INSTEAD
from tests.cri.client_verbs import call, ok, on_terminal, started
from tests.cri.server_harness import IMAGE, REPOSITORY, Server
from tests.support.processes import wait_until

OUTPUT = "for i in 1 2 3 4; do echo line $i; done; echo on stderr >&2; exec sleep 3600"


@pytest.fixture(scope="module")
def web(module_server: Server) -> Iterator[Server]:
    """Run two pods for all tests of this file: `web` with a running and an exited container, and
    `db` with kubelet's labels."""
    server = module_server
    web = server.run_pod(server.pod_config("web", labels={"app": "web", "tier": "front"}))
    main = server.container_config(["sh", "-c", OUTPUT], labels={"app": "web"})
    main.metadata.name = "main"
    server.launch(web, main)
    done = server.container_config(["sh", "-c", "echo first; exit 3"], log_path="done.log")
    done.metadata.name = "done"
    server.wait_exit(server.launch(web, done))
    again = server.container_config(["sh", "-c", "echo second; exit 4"], log_path="done-1.log")
    again.metadata.name, again.metadata.attempt = "done", 1
    server.wait_exit(server.launch(web, again))
    db = server.run_pod(
        server.pod_config("db", labels={"app": "db", "io.kubernetes.pod.uid": "some-uid"})
    )
    server.launch(db, server.container_config())
    yield server
    server.remove_all()


def identifier(server: Server, name: str) -> str:
    containers = [c for c in server.containers() if c.metadata.name == name]
    return max(containers, key=lambda c: c.metadata.attempt).id


def test_ps_lists_running_containers_and_with_all_the_ended_containers(web: Server) -> None:
    header, *rows = ok(web, "ps").lines
    assert header.split() == ["CONTAINER", "POD", "NAME", "STATE", "AGE", "IMAGE"]
    assert {tuple(row.split()[1:4]) for row in rows} == {
        ("web", "main", "running"),
        ("db", "c", "running"),
    }
    all_lines = ok(web, "ps", "-a").out
    assert "exited (3)" in all_lines and "exited (4)" in all_lines
    assert ok(web, "ps", "-q", "--latest").lines == [identifier(web, "c")]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--name", "^ma"], {"main"}),
        (["--state", "Exited"], {"done"}),
        (["--state", "CONTAINER_RUNNING"], {"main", "c"}),
        (["--pod", "web"], {"main"}),
        (["--image", IMAGE], {"main", "c"}),
        (["--label", "app=web"], {"main"}),
        (["--label", "app"], {"main"}),
        (["--selector", "app in (web, x),!y"], {"main"}),
        (["--selector", "app notin (web)"], {"c"}),
        (["--selector", "app!=web"], {"c"}),
        (["--filter", "name=main"], {"main"}),
        (["--filter", "status=exited", "--filter", "pod=web"], {"done"}),
        (["--last", "2"], {"c", "done"}),
        (["--namespace", "default", "--last", "1"], {"c"}),
        (["--namespace", "other"], set()),
    ],
)
def test_ps_filters_containers(web: Server, words: list[str], names: set[str]) -> None:
    assert {line.split("/")[1] for line in ok(web, "ps", "-o", "name", *words).lines} == names


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--state", "asleep"],
            "--state asleep: expected one of created, running, exited, unknown, paused",
        ),
        (["--label", "a in b"], "selector 'a in b': syntax error at 'in b'"),
        (["--name", "("], "'(' is not a regular expression"),
        (
            ["--filter", "colour=red"],
            "--filter colour=red: expected KEY=VALUE with one of name, id, label",
        ),
        (
            ["-o", "xml"],
            "-o xml: expected one of table, wide, json, yaml, name, go-template=TEMPLATE",
        ),
        (["--format", "{{.nothing}}"], "no field 'nothing'; the fields are id, podSandboxId"),
        (["--format", "{{range .labels}}"], "'range' has no end"),
    ],
)
def test_a_usage_error_names_the_option(web: Server, words: list[str], problem: str) -> None:
    assert problem in call(web, "ps", *words).error


def test_ps_has_output_formats(web: Server) -> None:
    (container,) = ok(web, "ps", "--name", "main", "-o", "json").json["containers"]
    assert (
        container["state"] == "CONTAINER_RUNNING"
        and int(container["createdAt"]) > 0
        and container["annotations"] == {}
    )
    assert "containers:\n- id:" in ok(web, "ps", "-o", "yaml").out
    assert "OWNER" in ok(web, "ps", "-o", "wide").lines[0]
    assert len(ok(web, "ps", "--no-headers").lines) == 2
    template = (
        '{{.ID}}: {{.metadata.name}} {{index .labels "app" | upper}}{{if eq .state'
        ' "x"}}?{{else}}!{{end}}'
    )
    assert ok(web, "ps", "--name", "main", "--format", template).lines == [
        f"{container['id']}: main WEB!"
    ]
    assert ok(web, "ps", "-o", "go-template", "--template", "{{.POD}}", "--name", "main").lines == [
        "web"
    ]


def test_pods_lists_and_filters_pods(web: Server) -> None:
    rows = {row.split()[2]: row.split() for row in ok(web, "pods").lines[1:]}
    assert (
        rows["web"][3] == "ready"
        and rows["web"][4].startswith("10.88.")
        and rows["web"][5] == "1/3"
    )
    assert ok(web, "pods", "--label", "tier=front", "-o", "name").lines == ["default/web"]
    wide = {row.split()[2]: row for row in ok(web, "pods", "-o", "wide").lines}
    assert wide["db"].endswith("kubelet")
    assert ok(web, "pods", "--state", "notready", "-q").lines == []


def test_only_a_terminal_gets_colours(web: Server) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}

    def output_with(**more: str) -> str:
        return on_terminal(web, "ps", environment=environment | more).stdout

    assert "\x1b[32mrunning" in output_with(TERM="xterm")
    assert "\x1b" not in output_with(TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in ok(web, "ps").out


def test_inspect_accepts_any_kind_of_name(web: Server) -> None:
    document = ok(web, "inspect", "main").json
    assert document["status"]["metadata"]["name"] == "main" and document["info"]["pid"] > 0
    assert (
        ok(web, "inspect", "--type", "pod", "web")
        .json["status"]["network"]["ip"]
        .startswith("10.88.")
    )
    assert ok(web, "inspect", IMAGE).json["status"]["repoTags"] == [IMAGE]
    assert "info" not in ok(web, "inspectp", "-q", "web").json
    assert [
        each["status"]["metadata"]["name"] for each in ok(web, "inspectp", "web", "db").json
    ] == [
        "web",
        "db",
    ]
    assert ok(web, "inspecti", "--format", "{{index .status.repoTags 0}}", IMAGE).lines == [IMAGE]
    assert call(web, "inspect", "nobody").error == "no such container, pod or image: 'nobody'"
    assert call(web, "inspecti", "no/such:image").error == "no such image: 'no/such:image'"


def test_names_and_prefixes_mean_the_newest_attempt(web: Server) -> None:
    newest = identifier(web, "done")
    for name in ("done", "web/done", newest[:10], newest):
        assert ok(web, "inspect", "--format", "{{.status.id}}", name).lines == [newest], name


def test_info_shows_the_node(web: Server) -> None:
    assert {c["type"]: c["status"] for c in ok(web, "info").json["status"]["conditions"]}[
        "RuntimeReady"
    ]
    assert "rootDir" in ok(web, "info").json["config"]
    assert re.search(r"^RuntimeName: +pyrunc$", ok(web, "version").out, re.MULTILINE)
    assert ok(web, "version", "-o", "json").json["runtimeApiVersion"] == "v1"
    rows = [row.split()[:2] for row in ok(web, "images-fs").lines]
    assert rows[1][0] == "images" and rows[1][1].startswith(str(web.root))
    assert ok(web, "imagefsinfo", "-o", "json").json["imageFilesystems"]


def test_images_lists_and_filters_images(web: Server) -> None:
    assert ok(web, "images").lines[1].split()[0] == IMAGE
    (whole,) = ok(web, "images", "-q").lines
    for name in (IMAGE, "registry.test/busybox", "registry.test/*", whole, whole[7:15]):
        assert ok(web, "images", "-q", name).lines == [whole], name
    assert ok(web, "images", "-q", "other").lines == []
    assert ok(web, "images", "--filter", "dangling=true", "-q").lines == []
    assert ok(web, "images", "-o", "json").json["images"][0]["repoTags"] == [IMAGE]
    assert "DIGEST" in ok(web, "images", "--digests").lines[0]


def test_stats_shows_usage_of_containers(web: Server) -> None:
    header, row = ok(web, "stats", "--seconds", "0.2", "--name", "main").lines
    assert header.split()[3:5] == ["CPU", "%"] and re.search(r"main +\d+\.\d\d ", row)
    (stats,) = ok(web, "stats", "main", "-o", "json").json["stats"]
    assert int(stats["cpu"]["usageCoreNanoSeconds"]["value"]) > 0
    header, row = ok(web, "statsp", "--seconds", "0.2", "web").lines
    assert row.split()[2] == "web" and "PIDS" in header
    assert {
        s["attributes"]["metadata"]["name"] for s in ok(web, "statsp", "-o", "json").json["stats"]
    } >= {
        "web",
        "db",
    }


def test_top_lists_processes(web: Server) -> None:
    rows = ok(web, "top", "main").lines[1:]
    (row,) = rows
    assert row.split()[0] == "main" and row.endswith("sleep 3600")
    assert [p["command"] for p in ok(web, "top", "--format", "json", "web").json["processes"]] == [
        "sleep 3600"
    ]
    assert "is not running" in call(web, "top", "done").error


def test_events_are_printed_as_they_happen(web: Server) -> None:
    arguments = ("--address", f"unix://{web.socket}", "events", "--pod", "noted")
    command = [sys.executable, "-m", "cri_server.cli.main", *arguments]
    pod, events = web.run_pod(web.pod_config("noted")), list[list[str]]()

    def heard() -> bool:
        # Events may precede the client's subscription: repeat them until one arrives.
        web.remove_container(web.create(pod))
        return bool(events)

    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(
            target=lambda: events.extend(line.split() for line in process.stdout or ())
        )
        reader.start()
        try:
            assert wait_until(heard, 30)
            container = web.launch(pod)
            web.stop_container(container)
            own = container[:12]
            assert wait_until(
                lambda: ["stopped", own] in [[line[1], line[-1]] for line in events], 30
            )
        finally:
            process.terminate()
            reader.join()
    assert [line[1:4] for line in events if line[-1] == own] == [
        [kind, "container", "default/noted/c"] for kind in ("created", "started", "stopped")
    ]
    web.remove_pod(pod)


def test_events_since_a_time_include_past_events(web: Server) -> None:
    """`events --since` prints past events, those of removed pods too, and then new ones."""
    pod = web.run_pod(web.pod_config("past"))
    first, second = (web.launch(pod, named(web, name)) for name in ("first", "second"))
    web.stop_container(first)
    web.remove_container(first)
    web.stop_pod(pod)
    web.remove_pod(pod)
    arguments = ("events", "--pod", "past", "--since", "1h")
    result = [line.split()[1:4] for line in ok(web, *arguments, "--until", "0s").lines]
    assert result == [
        ["created", "pod", "default/past"],
        ["started", "pod", "default/past"],
        *([kind, "container", "default/past/first"] for kind in ("created", "started")),
        *([kind, "container", "default/past/second"] for kind in ("created", "started")),
        *([kind, "container", "default/past/first"] for kind in ("stopped", "deleted")),
        ["stopped", "container", "default/past/second"],
        ["stopped", "pod", "default/past"],
        ["deleted", "container", "default/past/second"],
        ["deleted", "pod", "default/past"],
    ]
    assert ok(web, "events", "--pod", "past", "--since", "0s", "--until", "0s").lines == []
    (gone,) = [
        json.loads(line)
        for line in ok(web, *arguments, "--until", "0s", "-o", "json").lines
        if second in line and "DELETED" in line
    ]
    assert gone["podSandboxStatus"]["id"] == pod
    with started(web, *arguments) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[1].decode() for _ in result] == [
            each[0] for each in result
        ]
        pod = web.run_pod(web.pod_config("past", metadata=api.PodSandboxMetadata(attempt=1)))
        line = process.stdout.readline().decode().split()
        assert line[1:] == ["created", "pod", "default/past", pod[:12]]
        process.terminate()
    web.remove_pod(pod)


def named(server: Server, name: str) -> api.ContainerConfig:
    config = server.container_config(log_path=f"{name}.log")
    config.metadata.name = name
    return config


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--until", "1h"), "--until needs --since"),
        (("--since", "yesterday"), "'yesterday' is not a time"),
        (("--since", "1h", "--until", "2100-01-01T00:00:00Z"), "is in the future"),
        (("--since", "1h", "--label", "a=b"), "--since excludes --label"),
    ],
)
def test_invalid_times_of_events_are_refused(
    web: Server, words: tuple[str, ...], text: str
) -> None:
    output = call(web, "events", *words)
    assert output.code == 2 and text in output.error


def test_logs_have_options_of_kubectl(web: Server) -> None:
    web.wait_logged(identifier(web, "main"), "on stderr")
    result = ok(web, "logs", "main")
    assert (
        result.out.splitlines() == [f"line {n}" for n in range(1, 5)]
        and result.err == "on stderr\n"
    )
    assert ok(web, "logs", "--tail", "2", "main").lines == ["line 4"], "the last line is on stderr"
    assert ok(web, "logs", "--tail", "0", "main").lines == []
    assert ok(web, "logs", "-s", "stderr", "main").lines == []
    assert ok(web, "logs", "--limit-bytes", "8", "main").out == "line 1\nl"
    assert ok(web, "logs", "--since", "0s", "main").lines == []
    assert len(ok(web, "logs", "--since", "1h", "main").lines) == 4
    assert ok(web, "logs", "--until", "2020-01-01T00:00:00Z", "main").lines == []
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\S+ line 4", ok(web, "logs", "-t", "main").lines[-1])
    assert ok(web, "logs", "done").lines == ["second"]
    assert ok(web, "logs", "-p", "done").lines == ["first"]
    assert (
        call(web, "logs", "-p", "main").error
        == "container 'main' has no previous attempt (this is attempt 0)"
    )
    assert "'soon' is not a time" in call(web, "logs", "--since", "soon", "main").error
    assert ok(web, "logs", "-a", "web").lines[-1] == "done second"


def test_completion_suggests_names(web: Server) -> None:
    def offered(words: str, shell: str = "bash") -> list[str]:
        environment = {
            "_PYRUNC_CRI_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": f"pyrunc-cri --address unix://{web.socket} {words}",
            "COMP_CWORD": str(2 + len(words.split(" "))),
        }
        done = subprocess.run(
            [sys.executable, "-m", "cri_server.cli.main"],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert set(offered("logs ")) >= {"main", "web/main", "web", "db"}
    assert offered("inspectp w") == ["web"]
    assert offered("inspecti reg") == [IMAGE]
    assert offered(f"logs {identifier(web, 'main')[:6]}") == [identifier(web, "main")[:12]]
    assert offered("ps --state r") == ["running"]


def test_watch_prints_changes(web: Server) -> None:
    command = [
        sys.executable,
        "-m",
        "cri_server.cli.main",
        "--address",
        f"unix://{web.socket}",
        "pods",
        "-o",
        "name",
        "-w",
        "--interval",
        "0.1",
    ]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == [
                "default/db\n",
                "default/web\n",
            ]
            pod = web.run_pod(web.pod_config("newer"))
            assert process.stdout.readline() == "default/newer\n"
        finally:
            timer.cancel()
            process.terminate()
    web.remove_pod(pod)


def test_reopen_reopens_the_log(web: Server) -> None:
    main = identifier(web, "main")
    path = Path(web.status(main).log_path)
    path.rename(f"{path}.1")
    ok(web, "logs", "--reopen", "main")
    assert path.exists()
    web.runtime.ContainerStatus(api.ContainerStatusRequest(container_id=main))
    Path(f"{path}.1").rename(path)
    ok(web, "logs", "--reopen", "main")


def test_the_error_of_an_unknown_verb_suggests_a_known_verb() -> None:
    for arguments, suggestion in {
        "inspct": "Did you mean inspect",
        "play x": "run POD.YAML",
        "container ls": "ps, images",
    }.items():
        result = call("unix:///nowhere.sock", *arguments.split())
        assert result.code == 2 and suggestion in result.err, result
    assert not set(INSTEAD) & {*COMMANDS, *ALIASES}


def test_lists_show_the_image_name_of_the_request(web: Server) -> None:
    assert {line.split()[-1] for line in ok(web, "ps").lines[1:]} == {IMAGE}
    pod = web.run_pod(web.pod_config("by-id"))
    identity = web.image.ListImages(api.ListImagesRequest()).images[0].id
    config = web.container_config(["sleep", "3600"])
    config.image.image = identity
    web.launch(pod, config)
    assert (
        ok(web, "ps", "--pod", "by-id").lines[1].split()[-1]
        == identity.removeprefix("sha256:")[:12]
    )
    config.image.user_specified_image, config.metadata.name = "busybox", "named"
    web.launch(pod, config)
    assert "busybox" in [line.split()[-1] for line in ok(web, "ps", "--pod", "by-id").lines[1:]]
    web.remove_pod(pod)


def test_inspect_shows_the_origins_of_values(web: Server) -> None:
    config = web.container_config(["sleep", "3600"])
    config.metadata.name = "origins"
    config.envs.add(key="FROM_IMAGE", value=b"/secret")
    config.linux.security_context.run_as_user.value = 1000
    pod = web.run_pod(web.pod_config("origins"))
    web.launch(pod, config)
    lines = ok(web, "inspect", "--origins", "origins").lines
    rows = {line[:23].strip(): re.split(r"  +", line[24:].strip()) for line in lines[1:]}
    assert rows["argument 0"] == ["sleep", "request: command"]
    assert rows["env FROM_IMAGE"] == ["(not shown)", "request: envs (instead of the image's)"]
    assert rows["env PATH"] == ["/bin", "image: Env"]
    assert rows["user"][0].startswith("1000:") and rows["user"][1] == "request: run_as_user"
    assert rows["mount /etc/hosts"][1] == "pod" and rows["mount /proc"] == ["proc", "default"]
    assert rows["namespace network"][1] == "pod" and "secret" not in "".join(lines)
    web.remove_pod(pod)


def test_help_has_every_verb_once() -> None:
    text = ok("unix:///nowhere.sock", "--help").out
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", text, re.MULTILINE)
    assert len(listed) == len(set(listed)) and {"run", "ps", "pull", "serve", "doctor"} <= set(
        listed
    )
    assert set(listed) == set(COMMANDS) - {"demo-server"}
