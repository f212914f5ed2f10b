"""Tests the program's surroundings: user, rights, limits, environment, descriptors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Runtime

Config = dict[str, Any]


def status(runtime: Runtime, change: Any = None, **linux: Any) -> dict[str, str]:
    """Return /proc/self/status of the container's first process."""
    text = runtime.run("cat", "/proc/self/status", change=change, **linux).ok().out
    return dict(re.findall(r"^(\w+):[\t ]*(.*)$", text, re.M))


def process(**fields: Any) -> Any:
    return lambda config: config["process"].update(fields)


def test_a_process_has_exactly_the_listed_capabilities(runtime: Runtime) -> None:
    capabilities = {
        "bounding": ["CAP_CHOWN", "CAP_KILL", "CAP_SYS_CHROOT"], "permitted": ["CAP_CHOWN",
        "CAP_KILL"],
        "effective": ["CAP_CHOWN"], "inheritable": ["CAP_KILL"], "ambient": ["CAP_KILL"],
    }  # fmt: skip
    fields = status(runtime, process(capabilities=capabilities, user={"uid": 1000, "gid": 1000}))
    assert int(fields["CapBnd"], 16) == 1 << 0 | 1 << 5 | 1 << 18
    assert int(fields["CapInh"], 16) == int(fields["CapAmb"], 16) == 1 << 5
    # capabilities that a user keeps after execve by the ambient set
    assert int(fields["CapPrm"], 16) == 1 << 5


def test_a_process_can_have_no_capabilities(runtime: Runtime) -> None:
    fields = status(runtime, process(capabilities={}))
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        "0" * 16
    }


def test_unknown_capabilities_are_left_out(runtime: Runtime) -> None:
    names = ["CAP_KILL", "CAP_NO_SUCH_THING"]
    fields = status(
        runtime, process(capabilities={"bounding": names, "effective": names, "permitted": names})
    )
    assert int(fields["CapEff"], 16) == 1 << 5


def test_a_process_has_its_user_groups_and_umask(runtime: Runtime) -> None:
    fields = status(
        runtime, process(user={"uid": 5, "gid": 6, "umask": 0o27, "additionalGids": [7, 8]})
    )
    assert fields["Uid"].split() == ["5"] * 4 and fields["Gid"].split() == ["6"] * 4
    assert fields["Groups"].split() == ["7", "8"] and fields["Umask"] == "0027"


def test_groups_of_the_caller_do_not_leak(runtime: Runtime) -> None:
    assert status(runtime)["Groups"].strip() == ""


def test_no_new_privileges_is_set_as_configured(runtime: Runtime) -> None:
    assert status(runtime)["NoNewPrivs"] == "1"
    assert status(runtime, process(noNewPrivileges=False))["NoNewPrivs"] == "0"


def test_signals_are_as_in_a_fresh_process(runtime: Runtime) -> None:
    fields = status(runtime)
    assert int(fields["SigBlk"], 16) == 0
    if runtime.is_pyrunc:
        assert int(fields["SigIgn"], 16) == 0


def test_a_process_has_the_configured_environment(runtime: Runtime) -> None:
    env = ["PATH=/bin", "A=first", "B=with = and spaces", "A=last", "NL=a\nb"]
    out = runtime.run("sh", "-c", 'echo "$A|$B|$NL|$HOME"', change=process(env=env)).ok().out
    assert out == "last|with = and spaces|a\nb|/root\n"


def test_home_comes_from_the_containers_passwd(runtime: Runtime) -> None:
    user = {"uid": 1000, "gid": 1000}
    assert runtime.run("sh", "-c", "echo $HOME", change=process(user=user)).ok().out == "/tmp\n"
    assert (
        runtime.run("sh", "-c", "echo $HOME", change=process(user={"uid": 77, "gid": 77})).ok().out
        == "/\n"
    )


@pytest.mark.parametrize("bound", ["/etc/passwd", "/etc", "link", "peer", "tmpfs", "both"])
def test_home_comes_from_the_passwd_file_that_is_mounted(
    runtime: Runtime, tmp_path: Path, bound: str
) -> None:
    """HOME is looked up in the mounted passwd file, as in runc and crun, also for a user that the
    image does not have. An absolute link in a volume does not lead to the host's file."""
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("app:x:77:77::/srv/app:/bin/sh\n")
    (tmp_path / "secret").write_text("app:x:77:77::/secret:/bin/sh\n")

    def change(config: dict[str, Any]) -> None:
        config["process"]["user"] = {"uid": 77, "gid": 77}
        mounts = {"/etc": etc} if bound != "/etc/passwd" else {"/etc/passwd": etc / "passwd"}
        if bound == "both":
            (etc / "passwd").write_text("")
            (tmp_path / "passwd").write_text("app:x:77:77::/srv/app:/bin/sh\n")
            mounts["/etc/passwd"] = tmp_path / "passwd"
        elif bound == "link":
            (etc / "passwd").unlink()
            (etc / "passwd").symlink_to(tmp_path / "secret")
        for destination, source in mounts.items():
            config["mounts"].append(
                {"destination": destination, "type": "bind", "source": str(source),
                 "options": ["rbind", "ro"]}
            )  # fmt: skip
        if bound == "tmpfs":
            config["mounts"][-1] = {"destination": "/etc", "type": "tmpfs", "source": "tmpfs"}
        elif bound == "peer":
            # The runtime opens this bind: one of the container's process cannot be a peer.
            config["mounts"][-1]["options"].append("rshared")

    home = "/" if bound in ("link", "tmpfs") else "/srv/app"
    assert runtime.run("sh", "-c", "echo $HOME", change=change).ok().out == f"{home}\n"


def test_a_process_has_its_working_directory(runtime: Runtime) -> None:
    assert runtime.run("pwd", change=process(cwd="/etc")).ok().out == "/etc\n"


@pytest.mark.parametrize(
    "cwd", [f"/proc/self/fd/{n}{tail}" for n in (3, 5, 7, 8, 9) for tail in ("", "/../..")]
)
def test_the_working_directory_is_never_on_the_host(runtime: Runtime, cwd: str) -> None:
    result = runtime.run("sh", "-c", "ls -d home 2>/dev/null; pwd -P", change=process(cwd=cwd))
    assert result.code != 0 or "home" not in result.out, result


def test_a_process_has_its_rlimits(runtime: Runtime) -> None:
    limits = [
        {"type": "RLIMIT_NOFILE", "soft": 100, "hard": 200},
        {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
        {"type": "RLIMIT_STACK", "soft": 1 << 20, "hard": 2 << 20},
    ]
    out = runtime.run("cat", "/proc/self/limits", change=process(rlimits=limits)).ok().out
    assert re.search(r"Max open files\s+100\s+200", out)
    assert re.search(r"Max core file size\s+0\s+0", out)
    assert re.search(r"Max stack size\s+1048576\s+2097152", out)


def test_a_process_has_its_oom_score(runtime: Runtime) -> None:
    assert (
        runtime.run("cat", "/proc/self/oom_score_adj", change=process(oomScoreAdj=500)).ok().out
        == "500\n"
    )


def test_only_stdio_is_open(runtime: Runtime) -> None:
    stray = os.open("/etc/passwd", os.O_RDONLY)
    try:
        box = runtime.box("sh", "-c", "ls /proc/self/fd | wc -l")
        result = runtime("run", "--bundle", str(box.folder), box.id, pass_fds=(stray,)).ok()
    finally:
        os.close(stray)
    assert result.out.strip() == "4"


def test_run_works_with_closed_stdio(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "exit 8")
    line = (
        f"exec 0<&- 1>&- 2>&-; {' '.join(runtime.program)} --root {runtime.root} run "
        f"--bundle {box.folder} {box.id}"
    )
    assert os.waitstatus_to_exitcode(os.system(line)) == 8


def test_run_works_in_a_hostile_environment(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "umask; exit 4")
    line = (
        f"umask 0777; trap '' PIPE TERM; nice -n 5 env -i XDG_RUNTIME_DIR=/run LANG=C "
        f"{' '.join(runtime.program)} --root {runtime.root} run --bundle {box.folder} {box.id}"
    )
    assert os.waitstatus_to_exitcode(os.system(f"exec >/dev/null; {line}")) == 4


def test_the_executable_is_not_the_runtimes_file(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.create().ok()
    exe = os.stat(f"/proc/{box.pid}/exe")
    program = os.stat(runtime.program[0])
    if runtime.is_pyrunc:  # runc 1.1.5 protects its own file by a read-only bind
        assert (exe.st_dev, exe.st_ino) != (program.st_dev, program.st_ino)
    with pytest.raises(
        OSError, match=r"Text file busy|Permission denied|Operation not permitted|Read-only"
    ):
        open(f"/proc/{box.pid}/exe", "r+b")


def test_a_container_has_its_hostname_and_namespaces(runtime: Runtime) -> None:
    out = runtime.run("sh", "-c", "hostname; echo $$; ls /sys/class/net").ok().out.split()
    assert out == ["bundle", "1", "lo"]


def test_a_container_has_device_nodes_and_links(runtime: Runtime) -> None:
    script = (
        "for n in null zero full random urandom tty; do test -c /dev/$n || exit 1; done; for l "
        "in ptmx fd stdin; do readlink /dev/$l; done;"
        " echo x >/dev/null; head -c 4 /dev/zero | wc -c; stat -c '%a %t %T' /dev/null"
    )
    assert runtime.shell(script).out.split() == [
        "pts/ptmx",
        "/proc/self/fd",
        "/proc/self/fd/0",
        "4",
        "666",
        "1",
        "3",
    ]


def test_masked_and_read_only_paths_are_protected(runtime: Runtime) -> None:
    script = (
        "cat /proc/kcore | wc -c; ls /sys/firmware | wc -l; echo 1 >/proc/sys/kernel/panic "
        "2>/dev/null || echo refused"
    )
    out = runtime.shell(
        script,
        maskedPaths=["/proc/kcore", "/sys/firmware", "/no/such"],
        readonlyPaths=["/proc/sys", "/no"],
    ).out
    assert out.split() == ["0", "0", "refused"]


def test_a_read_only_root_cannot_be_written_to(runtime: Runtime) -> None:
    assert "refused" in runtime.shell("touch /x 2>/dev/null || echo refused").out


def test_a_container_has_its_sysctls(runtime: Runtime) -> None:
    out = runtime.shell(
        "cat /proc/sys/net/ipv4/ip_forward", sysctl={"net.ipv4.ip_forward": "1"}
    ).out
    assert out == "1\n"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (["HOME=/a", "HOME="], ["PATH=/bin", "HOME=/root"]),
        (["HOME=", "X=1", "HOME=/b"], ["X=1", "HOME=/b", "PATH=/bin"]),
        (["A=1", "B=2", "A=3"], ["B=2", "A=3", "PATH=/bin", "HOME=/root"]),
    ],
)
def test_the_last_value_of_a_variable_counts(
    runtime: Runtime, env: list[str], expected: list[str]
) -> None:
    """Of several values of a variable the last one counts, at its own position. An empty HOME is
    replaced by the user's home."""
    result = runtime.run("env", change=process(env=[*env, "PATH=/bin"])).ok()
    assert result.out.splitlines() == expected


def test_capabilities_that_are_not_granted_are_a_warning(runtime: Runtime) -> None:
    names = ["CAP_KILL", "CAP_UNHEARD_OF", "CAP_A"]
    capabilities = {
        "bounding": names, "permitted": ["CAP_KILL", "CAP_CHOWN"], "effective": ["CAP_KILL"],
        "inheritable": ["CAP_KILL"], "ambient": ["CAP_KILL", "CAP_CHOWN", "CAP_A"],
    }  # fmt: skip
    change = process(capabilities=capabilities)
    result = runtime.run("grep", "CapAmb", "/proc/self/status", change=change).ok()
    assert int(result.out.split()[1], 16) == 1 << 5
    lines = [
        line.partition("msg=")[2] for line in result.err.splitlines() if "level=warning" in line
    ]
    assert lines == [
        '"ignoring unknown or unavailable capabilities: [CAP_A CAP_UNHEARD_OF]"',
        '"can\'t raise ambient capability CAP_CHOWN: operation not permitted"',
    ]
    box = runtime.box("sleep", "60", change=change).up()
    for _ in range(2):
        assert box.exec("true").ok().err.count("level=warning") == 2
