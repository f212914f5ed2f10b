"""Tests that a runtime answers any configuration with a container or with one clear error, and
leaves nothing.

Hypothesis breaks a full configuration at one to three places: a property missing, null, of another
type, of absurd size, with NUL bytes, with paths that lead elsewhere. Each is created, started and
deleted in separate pid, mount and cgroup namespaces under a read-only root, because some
configurations name the host's namespaces.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import bundle, groups

Path_ = tuple[str | int, ...]
TIMEOUT_S = 60

# Creates, starts and deletes one configuration. Prints a line per fact; the state folder is on a
# separate tmpfs.
SCRIPT = r"""
set -eu
mount -t tmpfs tmpfs /run && mkdir /run/state
if [ -d /sys/fs/cgroup/unified ]; then tree=/sys/fs/cgroup/unified; else tree=/sys/fs/cgroup; fi
umount -l $tree && mount -t cgroup2 cgroup2 $tree
# a group with processes cannot enable controllers for its children
mkdir -p $tree/own && echo 0 >$tree/own/cgroup.procs
mount -t tmpfs tmpfs "$ROOTFS"
mkdir "$ROOTFS/bin" "$ROOTFS/proc" "$ROOTFS/sys" "$ROOTFS/dev" "$ROOTFS/tmp" "$ROOTFS/data"
cp "$BUSYBOX" "$ROOTFS/bin/busybox"
for applet in sh true sleep; do ln -s busybox "$ROOTFS/bin/$applet"; done
mount -o remount,bind,ro /
set +e
left() {
	find /run/state -mindepth 1 | sed 's/^/state /'
	find $tree -mindepth 1 -type d | sed 's/^/cgroup /'
	sed 's/^[0-9]* [0-9]* //' /proc/self/mountinfo | sed 's/^/mount /'
	for i in 1 2 3 4 5 6 7 8 9 10; do
		others=
		for p in /proc/[0-9]*/stat; do
			read -r pid name state rest 2>/dev/null <$p || continue
			case "$name $state" in "(sh) "* | *" Z") ;; *) others="$others $name" ;; esac
		done
		[ -z "$others" ] && break; sleep 0.05
	done
	[ -z "$others" ] || echo "process $others"
}
before=$(left)
"$@" create --bundle "$BUNDLE" x </dev/null >/run/out 2>/run/err; created=$?
echo "create $created"
if [ $created = 0 ]; then
	"$@" start x >>/run/out 2>&1; echo "start $?"
	"$@" delete --force x >>/run/out 2>&1; echo "delete $?"
fi
after=$(left)
left=$(echo "$after" | grep -vxF "$before")
# A program that removes a folder takes away what is mounted on it, here too: a container runtime
# beside this one does so.
gone=$(echo "$before" | grep -vxF "$after" | while read -r fact device root place rest; do
	[ "$fact" = mount ] && [ ! -e "$place" ] || echo "$fact $device $root $place $rest"
done)
[ -z "$left$gone" ] || { echo "left:"; echo "$left"; echo "gone:"; echo "$gone"; }
echo "errors:"; cat /run/err; echo "output:"; head -c 4000 /run/out
"""


def full() -> dict[str, Any]:
    """Return a working configuration that uses as many properties as possible."""
    hook = {"path": "/bin/true", "args": ["true", "x"], "env": ["A=b"], "timeout": 10}
    config = bundle.configuration(
        "true",
        cgroupsPath="/mutated/box",
        maskedPaths=["/proc/kcore", "/sys/firmware"],
        readonlyPaths=["/proc/sys", "/proc/bus"],
        sysctl={"net.ipv4.ip_forward": "1", "kernel.shm_rmid_forced": "1"},
        rootfsPropagation="rslave",
        personality={"domain": "LINUX"},
        timeOffsets={"monotonic": {"secs": 10, "nanosecs": 5}},
        devices=[{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 438,
        "uid": 0, "gid": 0}],
        seccomp={
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
            "flags": ["SECCOMP_FILTER_FLAG_SPEC_ALLOW"],
            "syscalls": [
                {
                    "names": ["chmod", "swapon"],
                    "action": "SCMP_ACT_ERRNO",
                    "errnoRet": 1,
                    "args": [{"index": 1, "value": 5, "valueTwo": 0, "op": "SCMP_CMP_EQ"}],
                }
            ],
        },
    )  # fmt: skip
    config["linux"]["namespaces"].append({"type": "time"})
    config["linux"]["resources"] = {
        "devices": [
            {"allow": False, "access": "rwm"},
            {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rw"},
        ],
        "memory": {"limit": 67108864, "reservation": 33554432, "swap": 67108864},
        "cpu": {"shares": 512, "quota": 50000, "period": 100000, "cpus": "0", "mems": "0"},
        "pids": {"limit": 100},
        "unified": {"memory.high": "50000000"},
    }
    config["process"] |= {
        "user": {"uid": 0, "gid": 0, "additionalGids": [5], "umask": 18},
        "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 64, "hard": 128}],
        "oomScoreAdj": 100,
        "scheduler": {"policy": "SCHED_BATCH", "nice": 5},
        "ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 4},
        "consoleSize": {"width": 80, "height": 25},
    }
    config["process"]["capabilities"] |= {"inheritable": ["CAP_KILL"], "ambient": ["CAP_KILL"]}
    config["root"] = {"path": "ROOTFS", "readonly": True}
    config["domainname"] = "example"
    config["mounts"] += [
        {"destination": "/data", "type": "bind", "source": "/usr/share", "options": ["rbind", "ro",
        "nosuid", "rprivate"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m",
        "mode=1777", "noexec"]},
    ]  # fmt: skip
    kinds = ("prestart", "createRuntime", "createContainer", "poststart", "poststop")
    config["hooks"] = {kind: [dict(hook)] for kind in kinds}
    config["annotations"] = {"org.example.key": "value"}
    fresh: dict[str, Any] = json.loads(json.dumps(config))
    return fresh


def places(value: Any, here: Path_ = ()) -> Iterator[Path_]:
    """Return the path of every property and element of a configuration."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in items:
        yield (*here, key)
        yield from places(below, (*here, key))


def json_path(place: Path_) -> str:
    """`("mounts", 3, "type")` -> `mounts[3].type`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


PLACES = tuple(places(full()))
MISSING = type("Missing", (), {"__repr__": lambda _: "MISSING"})()
OTHERS: tuple[Any, ...] = (
    7,
    -1,
    2.5,
    "text",
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"a": None},
    [1],
    ["x"],
    {"a": "b"},
)
SIZES: tuple[Any, ...] = (
    0, -(2**63), 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40, 1e308, "", "x" * 5000,
    "/" + "d/" * 3000, " ",
)  # fmt: skip
STRINGS: tuple[str, ...] = (
    "\0", "a\0b", "/proc/self/root", "/proc/1/root/etc", "../../../../etc", "/../..", "//", ".",
    "/", "a\nb", "\udcff", "\ud800", "é",
    "/dev/null", "/proc/self/fd/0", "/run/state/x", "/proc/self/ns/net", "/data/../tmp/./x//",
    "-x", "=", "%s%n", "\x1b[2J",
    "SCMP_ACT_NOTIFY", "RLIMIT_AS", "rprivate", "shared", "bind", "cgroup", "tmpfs", "proc",
    "user", "a", "CAP_SYS_ADMIN",
)  # fmt: skip
VALUES = st.one_of(
    st.just(MISSING),
    st.none(),
    st.sampled_from(OTHERS),
    st.sampled_from(SIZES),
    st.sampled_from(STRINGS),
    st.integers(-(2**65), 2**65),
    st.text(max_size=20),
)
MUTATIONS = st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3)


def mutated(
    mutations: list[tuple[Path_, Any]],
) -> tuple[dict[str, Any], list[tuple[Path_, Any, Any]]]:
    """Return a configuration with those changes that are possible, and a list of them: (place,
    replaced value, new value)."""
    config, done = full(), []
    for place, value in mutations:
        target: Any = config
        try:
            for key in place[:-1]:
                target = target[key]
            before = target[place[-1]]
            if value is MISSING:
                del target[place[-1]]
            else:
                target[place[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):  # an earlier change took it away
            continue
        done.append((place, before, value))
    return config, done


def kind(value: Any) -> str:
    """Return the JSON type by which the runtime judges a value; `nothing` for null and an absent
    value."""
    if value is None or value is MISSING:
        return "nothing"
    # 5 and 5.0 are both numbers.
    return (
        "number"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else type(value).__name__
    )


class Judge:
    """Runs one configuration after the other in a folder, and describes the faults of the
    runtime."""

    def __init__(self, folder: Path, group: Path) -> None:
        self.bundle, self.rootfs = folder / "bundle", folder / "rootfs"
        self.bundle.mkdir()
        self.rootfs.mkdir()
        self.command = [
            *("unshare", "--pid", "--fork", "--mount", "--cgroup", "--mount-proc", "--kill-child",
            "sh", "-c", SCRIPT, "sh"),
            *(*bundle.runtime(), "--root", "/run/state", "--missing-controllers", "warn"),
        ]  # fmt: skip
        self.environment = os.environ | {
            "BUNDLE": str(self.bundle),
            "ROOTFS": str(self.rootfs),
            "BUSYBOX": shutil.which("busybox") or "/bin/busybox",
        }
        self.group = group

    def run(self, config: dict[str, Any]) -> str:
        config.setdefault("root", {})
        if isinstance(config["root"], dict) and config["root"].get("path") == "ROOTFS":
            config["root"]["path"] = str(self.rootfs)
        (self.bundle / "config.json").write_text(json.dumps(config))
        done = subprocess.run(
            ["sh", "-c", groups.ENTER, str(self.group), *self.command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=self.environment,
            check=False,
        )
        assert not done.returncode, done.stderr
        return done.stdout.decode("utf-8", "replace")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    if "PYRUNC_RUNTIME" in os.environ:
        pytest.skip("other runtimes word their errors otherwise, and need the host's cgroups")
    with groups.own_group("mutations") as group:
        yield Judge(tmp_path_factory.mktemp("mutations"), group)


def check(judge: Judge, mutations: list[tuple[Path_, Any]]) -> None:
    """Check that the runtime answers with a container or one clear error, and leaves nothing."""
    config, changes = mutated(mutations)
    report = judge.run(config)
    what = f"{[(json_path(place), value) for place, _, value in changes]}\n{report}"
    facts, _, texts = report.partition("errors:\n")
    errors, _, _ = texts.partition("output:\n")
    codes = dict(
        line.split()
        for line in facts.splitlines()
        if line.split()[0] in ("create", "start", "delete")
    )
    assert codes["create"] in ("0", "1") and codes.get("start", "0") in ("0", "1"), what
    assert codes.get("delete", "0") == "0" and "left:" not in facts, what
    assert "Traceback" not in report and "internal error" not in report, what
    if codes["create"] == "1":
        lines = [line for line in errors.splitlines() if "level=error" in line]
        assert len(lines) == 1 and errors.count("\n") == 1, what
    if len(changes) == 1:
        place, before, value = changes[0]
        if kind(value) not in ("nothing", kind(before)):
            assert codes["create"] == "1", f"accepted: {what}"
            assert any(json_path(place[:n]) in errors for n in range(len(place), 0, -1)), (
                f"no path: {what}"
            )


BOUNDED: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def test_the_full_configuration_works(judge: Judge) -> None:
    report = judge.run(full())
    assert report.startswith("create 0\nstart 0\ndelete 0\nerrors:"), report


# Mounts and removes folders, like another container runtime on the machine; ends with its stdin.
OTHER_RUNTIME = """
cd "$0"; n=0
while [ -z "$(timeout 0.02 cat)" ]; do
	n=$((n+1)); mkdir $n && mount -t tmpfs other $n && mkdir $n.late &&
		mount -t tmpfs other $n.late && echo
	umount $n && rmdir $n && sleep 0.05; umount $n.late && rmdir $n.late
done
"""


def test_mounts_of_another_runtime_do_not_count_as_leaks(judge: Judge, tmp_path: Path) -> None:
    command = ["sh", "-c", OTHER_RUNTIME, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            for _ in range(5):
                assert other.stdout.readline() == b"\n"
                report = judge.run(full())
                assert report.startswith("create 0\nstart 0\ndelete 0\nerrors:"), report
        finally:
            other.stdin.write(b"end")
            other.stdin.close()
            # Its stdout stays open until it ends: SIGPIPE would end it before it unmounts.
            other.stdout.read()


@pytest.mark.timeout(300)
@given(mutations=MUTATIONS)
@settings(max_examples=60, derandomize=True, **BOUNDED)
def test_a_mutated_configuration_is_refused_or_runs(
    judge: Judge, mutations: list[tuple[Path_, Any]]
) -> None:
    check(judge, mutations)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(mutations=MUTATIONS)
@settings(max_examples=5000, **BOUNDED)
def test_many_mutated_configurations_are_refused_or_run(
    judge: Judge, mutations: list[tuple[Path_, Any]]
) -> None:
    check(judge, mutations)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "make", [lambda _: None, lambda _: {}, lambda _: [], lambda _: "", lambda v: [v], lambda _: 7]
)
def test_a_value_of_another_type_at_any_place_is_refused_or_runs(
    judge: Judge, make: Callable[[Any], Any]
) -> None:
    for place in PLACES:
        config = full()
        target: Any = config
        for key in place[:-1]:
            target = target[key]
        check(judge, [(place, make(target[place[-1]]))])
