"""Tests argv, environment, working directory and users for every combination of request and
image."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.spec import process, user
from pyrunc.errors import InvalidArgument


@pytest.mark.parametrize(
    ("command", "args", "entrypoint", "cmd", "expected"),
    [
        (["c"], [], ["e"], ["d"], ["c"]),
        (["c"], ["a"], ["e"], ["d"], ["c", "a"]),
        ([], ["a"], ["e"], ["d"], ["e", "a"]),
        ([], [], ["e"], ["d"], ["e", "d"]),
        ([], [], [], ["d"], ["d"]),
        ([], ["a"], [], ["d"], ["a"]),
    ],
)
def test_argv_combines_the_request_and_the_image(
    command: list[str], args: list[str], entrypoint: list[str], cmd: list[str], expected: list[str]
) -> None:
    assert process.argv(command, args, entrypoint, cmd) == expected


@pytest.mark.parametrize("command", [[], [""], ["a\0b"]])
def test_an_empty_command_is_an_error(command: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        process.argv(command, [], [], [])


def test_environment_is_the_images_overridden_by_the_callers() -> None:
    lines = process.environment(
        ["A=image", "B=image", "malformed", "=x", "EMPTY="], [("A", "cri"), ("C", "")],
        hostname="pod", tty=True, home="/root",
    )  # fmt: skip
    assert lines == [
        "A=cri",
        "B=image",
        "EMPTY=",
        f"PATH={process.DEFAULT_PATH}",
        "HOSTNAME=pod",
        "TERM=xterm",
        "C=",
        "HOME=/root",
    ]


def test_set_variables_are_not_overridden_by_defaults() -> None:
    lines = process.environment(
        ["PATH=/bin", "HOME=/image"],
        [("TERM", "dumb"), ("HOSTNAME", "mine")],
        hostname="pod",
        tty=True,
        home="/x",
    )
    assert set(lines) == {"PATH=/bin", "HOME=/image", "TERM=dumb", "HOSTNAME=mine"}


def test_an_empty_home_is_replaced_by_that_of_the_user() -> None:
    lines = process.environment(["HOME="], [("HOME", "")], hostname="", tty=False, home="/root")
    assert [line for line in lines if line.startswith("HOME")] == ["HOME=/root"]


@pytest.mark.parametrize("name", ["", "a=secret"])
def test_environment_names_are_checked_without_a_value_in_the_message(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        process.environment([], [(name, "secret")], hostname="", tty=False, home="")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("entry", ["=secret", "secret"])
def test_a_malformed_variable_of_an_exec_is_not_in_the_message(entry: str) -> None:
    with pytest.raises(InvalidArgument, match="is not NAME=VALUE") as caught:
        process.changed({"env": []}, {"env": [entry]})
    assert "secret" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_preserved() -> None:
    config = api.ContainerConfig(envs=[api.KeyValue(key="K", value=b"\xff\xfe")])
    ((key, value),) = process.cri_envs(config)
    assert key == "K" and value.encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_the_working_directory_is_that_of_request_or_image() -> None:
    assert process.working_dir("/cri", "/image") == "/cri"
    assert process.working_dir("", "/image") == "/image"
    assert process.working_dir("", "") == "/"
    with pytest.raises(InvalidArgument):
        process.working_dir("relative", "")


def test_an_exec_takes_the_containers_process_with_another_argv() -> None:
    own = {"args": ["main"], "env": ["A=1"], "cwd": "/x", "terminal": False}
    assert process.with_arguments(own, ["ls"], tty=False) == {**own, "args": ["ls"]}
    assert process.with_arguments(own, ["sh"], tty=True)["env"] == ["A=1", "TERM=xterm"]
    with pytest.raises(InvalidArgument):
        process.with_arguments(own, [], tty=False)


ACCOUNTS = user.Accounts.parse(
    b"root:x:0:0:root:/root:/bin/sh\nwww:x:33:34::/home/www:/bin/sh\n"
    b"broken\nbad:x:nan:0\nhuge:x:4294967296:0::/h:\n"
    b"evil:x:77:77::/h\rNL=1:\n",
    b"root:x:0:\nwww:x:34:\nextra:x:50:www,other\nother:x:51:nobody\n",
)


def context(**fields: object) -> api.LinuxContainerSecurityContext:
    return api.LinuxContainerSecurityContext(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "image", "uid", "gid", "groups", "home"),
    [
        ({}, "", 0, 0, (0,), "/root"),
        ({}, "www", 33, 34, (34, 50), "/home/www"),
        ({}, "33", 33, 34, (34, 50), "/home/www"),
        ({}, "1000", 1000, 0, (0,), "/"),
        ({}, "www:extra", 33, 50, (50,), "/home/www"),
        ({}, "www:99", 33, 99, (99, 50), "/home/www"),
        ({"run_as_user": api.Int64Value(value=5)}, "www:extra", 5, 0, (0,), "/"),
        ({"run_as_user": api.Int64Value(value=0)}, "www", 0, 0, (0,), "/root"),
        ({"run_as_username": "www"}, "", 33, 34, (34, 50), "/home/www"),
        (
            {"run_as_username": "www", "run_as_group": api.Int64Value(value=7)},
            "",
            33,
            7,
            (7, 50),
            "/home/www",
        ),
        (
            {"run_as_username": "www", "supplemental_groups": [1234, 50]},
            "",
            33,
            34,
            (34, 50, 1234),
            "/home/www",
        ),
        (
            {
                "run_as_username": "www",
                "supplemental_groups": [9],
                "supplemental_groups_policy": api.Strict,
            },
            "",
            33,
            34,
            (34, 9),
            "/home/www",
        ),
        ({}, "evil", 77, 77, (77,), "/"),
    ],
)
def test_users_are_resolved(
    fields: dict[str, object], image: str, uid: int, gid: int, groups: tuple[int, ...], home: str
) -> None:
    resolved = user.resolve(context(**fields), image, ACCOUNTS)
    assert (resolved.uid, resolved.gid, resolved.groups, resolved.home) == (uid, gid, groups, home)


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        ({}, "nobody-knows"),
        ({}, "www:nobody-knows"),
        ({}, "4294967296"),
        ({}, "-1"),
        ({}, "huge"),
        ({}, "root:x:.."),
        ({"run_as_group": api.Int64Value(value=1)}, ""),
        ({"run_as_user": api.Int64Value(value=-1)}, ""),
        ({"run_as_user": api.Int64Value(value=2**31)}, ""),
        ({"supplemental_groups": [-5]}, ""),
        ({"supplemental_groups_policy": 7}, ""),
    ],
)
def test_invalid_users_are_refused(fields: dict[str, object], image: str) -> None:
    with pytest.raises(InvalidArgument):
        user.resolve(context(**fields), image, ACCOUNTS)


SKIPPED = None
PASSWD_LINES = [
    # the line, and uid and gid as glibc (nss/nss_files/files-parse.c), musl
    # (src/passwd/getpwent_a.c), runc (moby/sys/user, parseLine) and this program read them
    ("www:x:33:34::/:/bin/sh", (33, 34), (33, 34), (33, 34), (33, 34)),
    ("www:x:33:::/:/bin/sh", SKIPPED, (33, 0), (33, 0), (33, 0)),
    ("www:x:33:", SKIPPED, SKIPPED, (33, 0), (33, 0)),
    ("www:x:33", SKIPPED, SKIPPED, (33, 0), (33, 0)),
    (" \twww:x:33:34::/:/bin/sh", (33, 34), SKIPPED, (33, 34), (33, 34)),
    ("www:x:33:34\r", SKIPPED, SKIPPED, (33, 34), (33, 34)),
    ("www:x:33:34:::/bin/sh  ", (33, 34), (33, 34), (33, 34), (33, 34)),
    # A wrong uid is 0 for runc, and an empty one for musl too: it would make root of an account
    # that says no such thing.
    ("www:x::34::/:/bin/sh", SKIPPED, (0, 34), (0, 34), SKIPPED),
    ("www:x:abc:34::/:/bin/sh", SKIPPED, SKIPPED, (0, 34), SKIPPED),
    ("www:x:33x:34::/:/bin/sh", SKIPPED, SKIPPED, (0, 34), SKIPPED),
    ("www:x: 33:34::/:/bin/sh", (33, 34), SKIPPED, (0, 34), SKIPPED),
    ("www:x:33:abc::/:/bin/sh", SKIPPED, SKIPPED, (33, 0), SKIPPED),
    ("www:x", SKIPPED, SKIPPED, (0, 0), SKIPPED),
    ("www", SKIPPED, SKIPPED, (0, 0), SKIPPED),
    ("#www:x:33:34::/:/bin/sh", SKIPPED, SKIPPED, SKIPPED, SKIPPED),
    ("www:x:-1:34::/:/bin/sh", SKIPPED, SKIPPED, (-1, 34), SKIPPED),
]
GROUP_LINES = [
    ("extra:x:50:www", 50, 50, 50, 50),
    ("extra:x::www", SKIPPED, 0, 0, 0),
    ("  extra:x:50:www", 50, SKIPPED, 50, 50),
    ("extra:x", SKIPPED, SKIPPED, 0, 0),
    ("extra:x:abc:www", SKIPPED, SKIPPED, 0, SKIPPED),
    ("#extra:x:50:www", SKIPPED, SKIPPED, SKIPPED, SKIPPED),
]
Ids = tuple[int, int] | None


class _Passwd(ctypes.Structure):
    """struct passwd of pwd.h."""

    _fields_ = [(name, ctypes.c_char_p) for name in ("name", "password")] + [
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
    ]


class _Group(ctypes.Structure):
    """struct group of grp.h."""

    _fields_ = [("name", ctypes.c_char_p), ("password", ctypes.c_char_p), ("gid", ctypes.c_uint32)]


def glibc_reads(function: str, result: type[ctypes.Structure], path: Path) -> Any:
    """Return the entry that fgetpwent(3) or fgetgrent(3) reads from a file with one line, or
    None."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    read = getattr(libc, function)
    read.restype, read.argtypes = ctypes.POINTER(result), [ctypes.c_void_p]
    file = libc.fopen(bytes(path), b"r")
    try:
        entry = read(file)
        return entry.contents if entry else None
    finally:
        libc.fclose(file)


@pytest.mark.parametrize(("line", "glibc", "musl", "runc", "ours"), PASSWD_LINES)
def test_a_line_of_passwd_is_parsed_like_runc(
    tmp_path: Path, line: str, glibc: Ids, musl: Ids, runc: Ids, ours: Ids
) -> None:
    """A line that runc would read as root by mistake is skipped."""
    file = tmp_path / "passwd"
    file.write_bytes(f"{line}\n".encode())
    entry = glibc_reads("fgetpwent", _Passwd, file)
    # Checks the table itself.
    assert (entry and (entry.uid, entry.gid)) == glibc
    accounts = user.Accounts.parse(file.read_bytes(), b"").users
    assert [(a.name, a.uid, a.gid) for a in accounts] == ([] if ours is None else [("www", *ours)])
    assert ours in (runc, SKIPPED) and (runc == ours or glibc != runc)


@pytest.mark.parametrize(("line", "glibc", "musl", "runc", "ours"), GROUP_LINES)
def test_a_line_of_group_is_parsed_like_runc(
    tmp_path: Path,
    line: str,
    glibc: int | None,
    musl: int | None,
    runc: int | None,
    ours: int | None,
) -> None:
    """Unlike in runc, a line with an invalid number is skipped."""
    file = tmp_path / "group"
    file.write_bytes(f"{line}\n".encode())
    entry = glibc_reads("fgetgrent", _Group, file)
    assert (entry and entry.gid) == glibc
    groups = user.Accounts.parse(b"", file.read_bytes()).groups
    assert [(g.name, g.gid) for g in groups] == ([] if ours is None else [("extra", ours)])
    assert ours in (runc, SKIPPED)


def test_the_home_is_that_of_the_first_line_with_the_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines after the user's are not parsed, because a mounted file may have a hundred thousand."""
    parsed = []

    def account(*fields: Any) -> user.Account:
        parsed.append(fields[0])
        return made(*fields)

    made = user.Account
    monkeypatch.setattr(user, "Account", account)
    passwd = b"root:x:0:0::/root:\napp:x:33:33::/srv:\nsame:x:33:33::/home:\n"
    assert user.home_of(33, passwd) == "/srv" and parsed == ["root", "app"]
    assert user.home_of(7, passwd) == "/"
