"""Tests that an exec has the container's namespaces and cgroup, its own identity, and no descriptor
of the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyrunc.compile.exec import ExecRequest, merged
from pyrunc.container.exec import execute
from pyrunc.errors import Error, InvalidArgument, InvalidSpec, NotFound, WrongState
from tests.kernel.box import Box, reap
from tests.support.processes import wait_until

KINDS = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user", "time")


def test_an_exec_is_in_the_containers_namespaces_and_cgroup_and_our_child(box: Box) -> None:
    with box.running() as (created, request):
        null = os.open("/dev/null", os.O_RDWR)
        secret = os.open("/", os.O_RDONLY)
        os.set_inheritable(secret, True)
        process = merged(request.spec, {"args": ["sleep", "1000"]})
        done = execute(
            ExecRequest(
                created.pid,
                created.pidfd,
                request.spec,
                process,
                (null, null, null),
                created.cgroup,
            )
        )
        os.close(null)
        os.close(secret)
        try:
            for kind in KINDS:
                assert os.readlink(f"/proc/{done.pid}/ns/{kind}") == os.readlink(
                    f"/proc/{created.pid}/ns/{kind}"
                )
            assert created.cgroup is not None
            assert created.cgroup.processes() == sorted([created.pid, done.pid])
            assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{done.pid}/status").read_text()
            assert sorted(os.listdir(f"/proc/{done.pid}/fd")) == ["0", "1", "2"]
            assert (
                os.stat(f"/proc/{done.pid}/root").st_ino
                == os.stat(f"/proc/{created.pid}/root").st_ino
            )
        finally:
            os.kill(done.pid, 9)
            assert reap(done) == 137


def test_an_exec_returns_output_and_exit_code(box: Box) -> None:
    with box.running() as (created, request):
        assert (
            box.execute(created, request, "echo out; echo err >&2; cat /proc/1/comm")
            == "out\nerr\nsleep\n"
        )
        with pytest.raises(AssertionError, match="exit code 3"):
            box.execute(created, request, "exit 3")


def test_an_exec_inherits_unset_fields_of_the_container(box: Box) -> None:
    box.process.update(
        user={"uid": 1000, "gid": 1000, "umask": 0o077, "additionalGids": [44]},
        env=["PATH=/bin", "A=b"],
        cwd="/tmp",
        noNewPrivileges=True,
        capabilities={"bounding": ["CAP_CHOWN"]},
        rlimits=[{"type": "RLIMIT_CORE", "soft": 1, "hard": 2}],
        oomScoreAdj=700,
    )
    with box.running() as (created, request):
        text = box.execute(
            created,
            request,
            "id -u; id -G; echo $A; pwd; umask; ulimit -c; cat /proc/self/oom_score_adj; grep "
            "NoNew /proc/self/status",
        )
        assert text.split() == [
            "1000",
            "1000",
            "44",
            "b",
            "/tmp",
            "0077",
            "0",
            "700",
            "NoNewPrivs:",
            "1",
        ]
        text = box.execute(
            created,
            request,
            "id -u; pwd; echo $A$B; umask",
            {
                "user": {"uid": 5, "gid": 6},
                "cwd": "/",
                "env": ["PATH=/bin", "B=c"],
                "capabilities": {},
            },
        )
        assert text.split() == ["5", "/", "c", "0077"]


def test_the_home_of_an_exec_is_looked_up_in_the_container(box: Box) -> None:
    with box.running() as (created, request):
        process = {"user": {"uid": 1000, "gid": 1000}, "env": ["PATH=/bin"]}
        assert box.execute(created, request, "echo $HOME", process) == "/home/web\n"


def test_an_exec_has_the_containers_seccomp_filter(box: Box) -> None:
    box.linux["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdirat", "mkdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}],
    }
    with box.running() as (created, request):
        assert "not implemented" in box.execute(created, request, "mkdir /tmp/x 2>&1 || true")


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        (["nope"], NotFound, "executable file not found in $PATH"),
        (["/nope"], NotFound, "no such file or directory"),
        (["/etc/passwd"], InvalidArgument, "permission denied"),
        (["/tmp"], InvalidArgument, "is a directory"),
    ],
)
def test_a_missing_program_is_an_error(
    box: Box, args: list[str], kind: type[Error], text: str
) -> None:
    with box.running() as (created, request):
        process = merged(request.spec, {"args": args})
        with pytest.raises(kind) as caught:
            execute(
                ExecRequest(
                    created.pid, created.pidfd, request.spec, process, cgroup=created.cgroup
                )
            )
        assert str(caught.value).endswith(text)
        assert created.cgroup is not None
        assert created.cgroup.processes() == [created.pid]


@pytest.mark.parametrize("name", ["script", "/opt/script"])
def test_a_program_without_its_interpreter_is_an_error(box: Box, name: str) -> None:
    (box.image / "opt").mkdir()
    (box.image / "opt/script").write_text("#!/no/interpreter\n")
    (box.image / "opt/script").chmod(0o755)
    with box.running() as (created, request):
        with pytest.raises(NotFound) as caught:
            box.execute(created, request, "true", {"args": [name], "env": ["PATH=/bin:/opt"]})
        assert str(caught.value).startswith(f"exec {name}: no such file or directory (")


def test_invalid_execs_are_refused(box: Box) -> None:
    with box.running() as (created, request):
        for document in (
            {"args": []},
            {"args": ["true"], "cwd": "tmp"},
            {"args": ["true"], "env": ["=x"]},
        ):
            with pytest.raises(InvalidSpec):
                process = merged(request.spec, dict(document))
                execute(
                    ExecRequest(
                        created.pid, created.pidfd, request.spec, process, cgroup=created.cgroup
                    )
                )


def test_a_missing_working_directory_is_an_error(box: Box) -> None:
    with box.running() as (created, request), pytest.raises(Error, match="chdir '/none'"):
        box.execute(created, request, "true", {"cwd": "/none"})


def test_an_exec_in_an_ended_container_is_an_error(box: Box) -> None:
    with box.running("sleep", "0") as (created, request):
        os.waitid(os.P_PIDFD, created.pidfd, os.WEXITED | os.WNOWAIT)
        with pytest.raises(WrongState, match="not running"):
            box.execute(created, request, "true")


def test_an_exec_works_after_init_moved_into_a_group_below(box: Box) -> None:
    """An exec works although init has moved itself into a child cgroup, after which the container's
    own cgroup accepts no processes."""
    with box.running() as (created, request):
        assert created.cgroup is not None
        below = Path(created.cgroup.directory) / "below"
        below.mkdir()
        (below / "cgroup.procs").write_text(str(created.pid))
        (below.parent / "cgroup.subtree_control").write_text(
            " ".join(
                f"+{name}" for name in (below.parent / "cgroup.controllers").read_text().split()
            )
        )
        assert box.execute(created, request, "cat /proc/self/cgroup | grep ^0:").strip() in (
            "0::/",
            "0::/below",
        )


def test_an_exec_follows_init_when_the_containers_group_is_gone(box: Box) -> None:
    """An exec runs in init's cgroup when an init that may write to the cgroup tree has moved to
    another cgroup and removed the container's."""
    with box.running() as (created, request):
        assert created.cgroup is not None
        group = Path(created.cgroup.directory)
        other = group.with_name(f"{group.name}-other")
        other.mkdir()
        (other / "cgroup.procs").write_text(str(created.pid))
        group.rmdir()
        try:
            process = merged(request.spec, {"args": ["sleep", "1000"]})
            exec_request = ExecRequest(
                created.pid, created.pidfd, request.spec, process, cgroup=created.cgroup
            )
            done = execute(exec_request)
            assert (other / "cgroup.procs").read_text().split() == [
                str(created.pid),
                str(done.pid),
            ]
            os.kill(done.pid, 9)
            reap(done)
            with pytest.raises(Error, match="ENOENT"):
                execute(exec_request.replace(follow=False))
        finally:
            os.kill(created.pid, 9)
            os.waitid(os.P_PIDFD, created.pidfd, os.WEXITED | os.WNOWAIT)
            assert wait_until(lambda: _removed(other), 10)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def test_a_program_of_an_exec_is_never_a_file_of_the_host(box: Box) -> None:
    """CVE-2019-5736: an exec of a script whose interpreter is /proc/self/exe fails and runs no
    program of the host."""
    (box.image / "bin/evil").write_text("#!/proc/self/exe\n")
    (box.image / "bin/evil").chmod(0o755)
    with box.running() as (created, request):
        process = merged(request.spec, {"args": ["/bin/evil"]})
        try:
            done = execute(
                ExecRequest(
                    created.pid, created.pidfd, request.spec, process, cgroup=created.cgroup
                )
            )
        except Error:
            return
        assert reap(done) != 0


def test_many_execs_leave_no_descriptors(box: Box) -> None:
    with box.running() as (created, request):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            assert box.execute(created, request, "true") == ""
        assert len(os.listdir("/proc/self/fd")) == before
