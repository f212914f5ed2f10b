"""Tests how values of the command line are parsed: ids, signals, sizes, durations, users."""

from __future__ import annotations

from typing import Any

import pytest

from pyrunc.cli.inspect import duration_s
from pyrunc.cli.process import process_from_options
from pyrunc.cli.rootless import for_an_ordinary_user
from pyrunc.container.kill import parse_signal
from pyrunc.container.state import check_id, root_of
from pyrunc.container.update import from_options, size_bytes
from pyrunc.errors import InvalidArgument
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse

OPTIONS: dict[str, Any] = dict.fromkeys(
    [
        "process",
        "tty",
        "env",
        "cwd",
        "user",
        "additional_gids",
        "cap",
        "no_new_privs",
        "apparmor",
        "process_label",
    ]
)


@pytest.mark.parametrize("good", ["a", "A-1_2.3+x", "0", "-", "_", "a" * 255])
def test_valid_ids_are_accepted(good: str) -> None:
    assert check_id(good) == good


@pytest.mark.parametrize(
    "bad", ["", ".", "..", ".a", "a/b", "a b", "é", "a\n", "a\0", "a" * 256, "a:b"]
)
def test_invalid_ids_are_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid container ID format"):
        check_id(bad)


@pytest.mark.parametrize(
    ("text", "number"),
    [("9", 9), ("KILL", 9), ("SIGKILL", 9), ("sigterm", 15), ("usr1", 10), ("0", 0), ("RTMIN", 34),
    ("RTMIN+1", 35),
     ("SIGRTMAX-1", 63), ("64", 64), ("CLD", 17), ("SYS", 31)],
)  # fmt: skip
def test_signals_are_parsed(text: str, number: int) -> None:
    assert parse_signal(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "-9", "65", "SIGFOO", "RTMIN+", "RTMIN-1", "RTMIN+99", "9 ", "¹", "RTMIN+²", "9" * 5000],
)
def test_invalid_signals_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_signal(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("1k", 1024),
        ("2M", 2 << 20),
        ("3g", 3 << 30),
        ("1KiB", 1024),
        ("5mb", 5 << 20),
        ("-1", -1),
        ("7b", 7),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert size_bytes(text, "memory") == size


@pytest.mark.parametrize("text", ["", "k", "1x", "1.5g", "--1", "0x10"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--memory-swap"):
        size_bytes(text, "memory_swap")


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("500ms", 0.5), ("2m", 120), ("1.5h", 5400)]
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "0s", "five s"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        duration_s(text)


def test_update_names_only_the_passed_limits() -> None:
    from pyrunc.cli.parse import parse as parse_line

    options = parse_line(
        [
            "update",
            "--memory",
            "1m",
            "--cpu-quota",
            "-1",
            "--pids-limit",
            "5",
            "--cpuset-cpus",
            "0",
            "x",
        ]
    ).options
    assert from_options(options) == {
        "cpu": {"quota": -1, "cpus": "0"},
        "pids": {"limit": 5},
        "memory": {"limit": 1 << 20},
    }


BASE = {
    "args": ["sh"],
    "env": ["A=1"],
    "user": {"uid": 5, "gid": 6, "additionalGids": [7]},
    "terminal": True,
}


def test_exec_starts_from_the_containers_process_and_applies_its_options() -> None:
    process = process_from_options(
        BASE,
        OPTIONS | {"env": ("B=2",), "user": "0:8", "additional_gids": ("9",), "tty": False},
        ["ls", "-l"],
    )
    assert (
        process["args"] == ["ls", "-l"]
        and process["env"] == ["A=1", "B=2"]
        and process["terminal"] is False
    )
    assert process["user"] == {"uid": 0, "gid": 8, "additionalGids": [7, 9]}


@pytest.mark.parametrize(
    "user", ["0x0", "1000:", ":5", "root", "1 ", "+1", "1:2:3", "4294967295", "-1"]
)
def test_a_user_is_whole_numbers(user: str) -> None:
    with pytest.raises(InvalidArgument):
        process_from_options(BASE, OPTIONS | {"user": user}, ["id"])


def test_added_capabilities_become_ambient_only_with_inheritable_capabilities() -> None:
    plain = process_from_options(
        {"capabilities": {"bounding": ["CAP_KILL"]}}, OPTIONS | {"cap": ("CAP_CHOWN",)}, ["x"]
    )
    assert plain["capabilities"] == {
        "bounding": ["CAP_KILL", "CAP_CHOWN"],
        "effective": ["CAP_CHOWN"],
        "permitted": ["CAP_CHOWN"],
    }
    inheriting = process_from_options(
        {"capabilities": {"inheritable": ["CAP_KILL"]}}, OPTIONS | {"cap": ("CAP_CHOWN",)}, ["x"]
    )
    assert inheriting["capabilities"]["ambient"] == ["CAP_CHOWN"]
    assert inheriting["capabilities"]["inheritable"] == ["CAP_KILL"]


@pytest.mark.parametrize("root", ["/", "", "///"])
def test_the_root_of_all_files_holds_no_containers(root: str) -> None:
    with pytest.raises(InvalidArgument):
        root_of(root)


def test_the_rootless_configuration_is_valid() -> None:
    document = for_an_ordinary_user(default(), 1000, 1001)
    check(parse(document))
    linux = document["linux"]
    assert (
        linux["uidMappings"] == [{"containerID": 0, "hostID": 1000, "size": 1}]
        and "resources" not in linux
    )
    assert {"type": "user"} in linux["namespaces"] and {"type": "network"} not in linux[
        "namespaces"
    ]
    assert not any(
        option.startswith(("gid=", "uid="))
        for mount in document["mounts"]
        for option in mount.get("options", [])
    )
