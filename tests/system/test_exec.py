"""Tests `exec`: another program in a running container."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Box, Runtime, eventually, reap


@pytest.fixture
def box(runtime: Runtime) -> Box:
    return runtime.box("sleep", "60").up()


def test_exec_passes_output_input_and_exit_code(box: Box) -> None:
    result = box.exec("sh", "-c", "cat; echo err >&2; exit 3", stdin="in\n")
    assert (result.out, result.err, result.code) == ("in\n", "err\n", 3)


def test_an_exec_shares_the_containers_namespaces(box: Box) -> None:
    for kind in ("mnt", "pid", "net", "ipc", "uts", "cgroup"):
        inside = box.exec("readlink", f"/proc/self/ns/{kind}").ok().out.strip()
        assert (
            inside
            == os.readlink(f"/proc/{box.pid}/ns/{kind}")
            != os.readlink(f"/proc/self/ns/{kind}")
        )


def test_an_exec_is_in_the_containers_cgroup(runtime: Runtime, box: Box, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    box.exec("sleep", "30", options=["--detach", "--pid-file", str(file)]).ok()
    here = Path(f"/proc/{file.read_text()}/cgroup").read_text()
    assert here == Path(f"/proc/{box.pid}/cgroup").read_text()


def test_a_detached_exec_becomes_a_child_of_the_caller(box: Box, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    box.exec("sh", "-c", "exit 9", options=["--detach", "--pid-file", str(file)]).ok()
    _, status = os.waitpid(int(file.read_text()), 0)
    assert os.waitstatus_to_exitcode(status) == 9


@pytest.mark.parametrize(
    ("options", "command", "expected"),
    [
        (["--cwd", "/tmp"], "pwd", "/tmp"),
        (["-e", "A=1 2", "-e", "B="], "echo $A.$B.", "1 2.."),
        (["--user", "1000:1001"], "echo $(id -u):$(id -g)", "1000:1001"),
        (
            ["--user", "1000", "-g", "7", "-g", "8"],
            "grep ^Groups /proc/self/status | tr -d '\t\n '",
            "Groups:78",
        ),
        (["--cap", "CAP_SYS_ADMIN"], "grep CapEff /proc/self/status | cut -f2", "0000000020200420"),
    ],
)
def test_exec_applies_its_options(
    box: Box, options: list[str], command: str, expected: str
) -> None:
    assert box.exec("sh", "-c", command, options=options).ok().out.strip() == expected


@pytest.mark.parametrize("user", ["root", "0x0", "1:", "-1", "1000:g"])
def test_exec_refuses_user_names(runtime: Runtime, box: Box, user: str) -> None:
    result = box.exec("id", options=[f"--user={user}"])
    assert result.code in ((255,) if runtime.is_pyrunc else (1, 255)), result


def test_exec_reads_a_process_from_a_file(box: Box, tmp_path: Path) -> None:
    process: dict[str, Any] = {
        "args": ["sh", "-c", "echo $X; id -u; pwd"], "env": ["PATH=/bin", "X=y"], "cwd": "/etc",
        "user": {"uid": 5, "gid": 5},
    }  # fmt: skip
    file = tmp_path / "process.json"
    file.write_text(json.dumps(process))
    result = box.runtime("exec", "--process", str(file), box.id).ok()
    assert result.out.split() == ["y", "5", "/etc"]


def test_exec_reads_a_process_from_a_pipe(runtime: Runtime, box: Box) -> None:
    """`exec --process` reads its file only once, so the shell's `<(...)`, a pipe, works."""
    process = {
        "args": ["echo", "piped"],
        "env": ["PATH=/bin"],
        "cwd": "/",
        "user": {"uid": 0, "gid": 0},
    }
    command = runtime.command("exec", "--process", "/dev/fd/3", box.id)
    script = f"{shlex.join(command)} 3< <(echo {shlex.quote(json.dumps(process))})"
    for _ in range(2):
        done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, b"piped\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nosuchprogram", "executable file not found in $path"),
        ("/no/such", "no such file or directory"),
        ("/etc/passwd", "permission denied"),
    ],
)
def test_a_program_that_cannot_run_is_exit_code_255(box: Box, command: str, words: str) -> None:
    box.exec(command).fails(words, code=255)


def test_exec_is_refused_in_a_stopped_container(runtime: Runtime) -> None:
    box = runtime.box("true")
    box.up().gone()
    box.exec("true").fails("cannot exec in a stopped container", code=255)


def test_exec_works_in_a_created_container(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.create().ok()
    assert box.exec("echo", "early").ok().out == "early\n"
    assert box.status == "created"
    box.start().ok()


def test_only_stdio_is_open(box: Box) -> None:
    result = box.exec("sh", "-c", "ls /proc/self/fd | wc -l").ok()
    assert result.out.strip() == "4"  # 0, 1, 2 and the one that ls reads with


def test_preserved_descriptors_arrive(runtime: Runtime, box: Box, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content\n")
    program = shlex.join(runtime.command("exec", "--preserve-fds", "1", box.id))
    line = f"exec 3<{tmp_path}/file; exec {program} sh -c 'cat <&3'"
    assert (
        subprocess.run(line, shell=True, check=True, capture_output=True, timeout=60).stdout
        == b"content\n"
    )


def test_exec_reports_a_container_that_has_ended(box: Box) -> None:
    box.kill("KILL").ok()
    box.gone()
    box.exec("true").fails("stopped", code=255)


def test_many_execs_run_at_once(box: Box, tmp_path: Path) -> None:
    files = [tmp_path / f"pid{n}" for n in range(12)]
    for file in files:
        box.exec("sh", "-c", "exit 4", options=["--detach", "--pid-file", str(file)]).ok()
    codes = [os.waitstatus_to_exitcode(os.waitpid(int(file.read_text()), 0)[1]) for file in files]
    assert codes == [4] * 12


def test_exec_can_have_a_terminal(runtime: Runtime, box: Box, tmp_path: Path) -> None:
    from tests.system.console import receive_terminal

    with receive_terminal(tmp_path / "console.sock") as console:
        box.exec(
            "sh", "-c", "test -t 0 && stty size >/dev/null && echo yes; sleep 0.2",
            options=["--tty", "--detach", "--console-socket", str(console.path)],
        ).ok()  # fmt: skip
        assert b"yes" in console.read_until(b"yes")


def test_the_inits_move_to_a_subgroup_does_not_stop_exec(runtime: Runtime, box: Box) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("another runtime's cgroup tree")
    group = Path("/sys/fs/cgroup/unified")
    if not group.is_dir():
        group = Path("/sys/fs/cgroup")
    leaf = group / box.id / "leaf"
    leaf.mkdir()
    (leaf / "cgroup.procs").write_text(str(box.pid))
    box.exec("true").ok()
    eventually(lambda: box.status == "running")


# -- repeated execs: from the second on a stored program runs, without a visible difference


def test_the_same_command_again_does_the_same(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60").up()
    script = (
        "id -u; id -G; pwd; echo $HOME; grep -E 'Cap|Seccomp|NoNew|Umask|Groups' "
        "/proc/self/status; cat /proc/self/cgroup"
    )
    options = ["--user", "7:8", "-g", "9", "--cwd", "/tmp", "-e", "A=b", "--cap", "CAP_KILL"]
    first, second, third = (
        box.exec("sh", "-c", script, options=options).ok().out for _ in range(3)
    )
    assert first == second == third and first.splitlines()[::2][:2] == ["7", "/tmp"]
    assert box.exec("sh", "-c", "exit 7").code == box.exec("sh", "-c", "exit 7").code == 7


def test_a_changed_container_outdates_a_stored_program(runtime: Runtime, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["root"]["readonly"] = False
        for place in ("/etc", "/tmp"):
            config["mounts"].append({"destination": place, "type": "tmpfs", "source": "tmpfs"})

    box = runtime.box("sleep", "60", change=change).up()
    home = lambda: box.exec("sh", "-c", "echo $HOME").ok().out.strip()  # noqa: E731
    assert home() == home() == "/"
    box.exec("sh", "-c", "echo root:x:0:0::/there:/bin/sh >/etc/passwd").ok()
    assert home() == home() == "/there"
    box.exec(
        "sh", "-c", "cp /etc/passwd /tmp/real; rm /etc/passwd; ln -s /tmp/real /etc/passwd"
    ).ok()
    assert home() == home() == "/there"
    box.exec("sh", "-c", "echo root:x:0:0::/elsewhere:/bin/sh >/tmp/real").ok()
    assert home() == home() == "/elsewhere"
    process = tmp_path / "process.json"
    for cwd in ("/tmp", "/dev", "/tmp"):
        process.write_text(
            json.dumps({"args": ["/bin/pwd"], "cwd": cwd, "user": {"uid": 0, "gid": 0}})
        )
        assert box.exec(options=["--process", str(process)]).ok().out.strip() == cwd


def test_a_stored_program_fails_with_the_usual_errors(runtime: Runtime) -> None:
    box = runtime.box(
        "sleep",
        "60",
        change=lambda c: c["mounts"].append(
            {"destination": "/tmp", "type": "tmpfs", "source": "t"}
        ),
    ).up()
    box.exec("sh", "-c", "echo '#!/bin/sh' >/tmp/x; echo echo ran >>/tmp/x; chmod +x /tmp/x").ok()
    assert box.exec("/tmp/x").ok().out == box.exec("/tmp/x").ok().out == "ran\n"
    box.exec("rm", "/tmp/x").ok()
    box.exec("/tmp/x").fails("no such file or directory", code=255)


def test_a_process_from_a_file_inherits_no_field_of_the_container(
    runtime: Runtime, tmp_path: Path
) -> None:
    """Fields that the file lacks, as Go's omitempty leaves out empty and false ones, are not taken
    from the container."""
    box = runtime.box(
        "sleep", "60", change=lambda config: config["process"]["env"].append("X=container")
    ).up()
    script = "echo x$X; grep NoNewPrivs /proc/self/status"
    file = tmp_path / "process.json"
    file.write_text(
        json.dumps({"args": ["/bin/sh", "-c", script], "cwd": "/", "user": {"uid": 0, "gid": 0}})
    )
    lines = box.runtime("exec", "--process", str(file), box.id).ok().out.split()
    assert lines == ["x", "NoNewPrivs:", "0"]


@pytest.mark.parametrize(
    ("option", "value"), [([], "1"), (["--no-new-privs=false"], "0"), (["--no-new-privs"], "1")]
)
def test_an_option_of_exec_changes_no_new_privileges(
    box: Box, option: list[str], value: str
) -> None:
    result = box.exec("grep", "NoNewPrivs", "/proc/self/status", options=option).ok()
    assert result.out.split()[1] == value


def test_a_console_socket_needs_a_terminal(box: Box, tmp_path: Path) -> None:
    for _ in range(2):
        result = box.exec("true", options=["--console-socket", str(tmp_path / "c")])
        result.fails("cannot use console socket if", code=255)
        box.exec("true").ok()


def test_a_process_that_cannot_be_reported_is_killed(runtime: Runtime, box: Box) -> None:
    for option in (
        ["--pid-file", "/no/such/folder/pid"],
        ["--pidfd-socket", "/no/such/folder/socket"],
    ):
        box.exec("sleep", "1000", options=["--detach", *option]).fails(
            "no such file or directory", code=255
        )
    reap()
    assert runtime("ps", "--format", "json", box.id).ok().json == [box.pid]


def test_the_pid_file_may_be_a_pipe(runtime: Runtime, box: Box) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc renames a file over it")
    program = shlex.join(runtime.command("exec", "--pid-file"))
    script = f"exec 3>&1; {program} /dev/fd/3 {box.id} readlink /proc/self/exe"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=True)
    assert re.fullmatch(rb"\d+/bin/busybox\n|/bin/busybox\n\d+", done.stdout)


def test_sockets_of_another_process_are_not_passed(box: Box) -> None:
    """`exec` drops an inherited LISTEN_FDS that a service manager has set for its parent
    process."""
    assert box.exec("sh", "-c", "echo x$LISTEN_FDS", env={"LISTEN_FDS": "1"}).ok().out == "x\n"
