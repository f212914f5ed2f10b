"""Tests plans: their lines, order and warnings; every operation has a text and can be compiled."""

from __future__ import annotations

import copy
import errno
import inspect
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrunc.errors import InvalidSpec
from pyrunc.kernel.path import clean
from pyrunc.launch.steps import perform
from pyrunc.plan import build as plans
from pyrunc.plan import lower as lowering
from pyrunc.plan import model, mounts
from pyrunc.plan.identity import environment
from pyrunc.plan.lower import lower
from pyrunc.plan.lower_process import candidates
from pyrunc.plan.model import HostFacts, LoadFilter, Op, Plan, RootfsFacts
from pyrunc.plan.parent import ParentOptions
from pyrunc.plan.show import LINES, STEP_LINES, line, numbered, show
from pyrunc.program.errors import failure
from pyrunc.spec.check import cpu_list
from pyrunc.spec.default import MASKED_PATHS, default
from pyrunc.spec.model import CpuAffinity, Mount, Namespace, Process, Spec
from pyrunc.spec.parse import parse

HOST = HostFacts(capabilities=(1 << 41) - 1, last_capability=40, oom_score_adj=0)


def plan_spec(change: dict[str, Any] | None = None) -> Spec:
    document = copy.deepcopy(default())
    for path, value in (change or {}).items():
        place = document
        *keys, last = path.split(".")
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = value
    return parse(document)


def plan(change: dict[str, Any] | None = None, **more: Any) -> Plan:
    facts = more.pop("facts", RootfsFacts())
    return plans.build(plan_spec(change), HOST, facts, plans.StartPlanOptions(**more))


@pytest.mark.parametrize(
    ("namespaces", "options"),
    [
        ([{"type": "mount"}, {"type": "cgroup"}], ()),
        ([{"type": "mount"}], (("nsdelegate", None), ("memory_recursiveprot", None))),
        (
            [{"type": "mount"}, {"type": "cgroup", "path": "/proc/1/ns/cgroup"}],
            (("nsdelegate", None), ("memory_recursiveprot", None)),
        ),
    ],
)
def test_a_cgroup_mount_repeats_the_options_of_the_machines_superblock(
    namespaces: list[dict[str, str]], options: tuple[tuple[str, None], ...]
) -> None:
    """Without these options, a mount in the initial cgroup namespace would clear the options of the
    machine's only cgroup2 superblock. A mount in a new cgroup namespace needs none."""
    host = HOST.replace(cgroup_options=("nsdelegate", "memory_recursiveprot"))
    spec = plan_spec({"linux.namespaces": namespaces})
    ops = plans.build(spec, host, RootfsFacts(), plans.StartPlanOptions()).ops
    (mount,) = [op for op in ops if isinstance(op, model.MountFs) and op.type == "cgroup2"]
    assert mount.options == options


def operations() -> set[type]:
    return {kind for kind in Op.__subclasses__() if kind.__module__ == model.__name__}


def test_the_set_of_operations_is_closed() -> None:
    assert operations() == set(LINES) == set(lowering.CALLS)
    assert set(lowering.NEEDS) <= operations()


def test_the_default_plan_has_these_lines() -> None:
    text = show(plan({"process.terminal": True}, keyring="_ses.x"))
    assert text.splitlines() == [
        "   1  prepare 'pyrunc:init'",
        "   2  clone process into its cgroup with new namespaces pid,net,ipc,uts,mnt,cgroup",
        "   3  setsid",
        "   4  link lo up",
        "   5  keyctl join session '_ses.x'",
        "   6  propagate all mounts rslave",
        "   7  attach root rslave",
        "   8  mount 'proc' on '/proc'",
        "   9  mount 'tmpfs' on '/dev' (nosuid,strictatime,mode=755,size=65536k)",
        "  10  mount 'devpts' on '/dev/pts' "
        "(nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5)",
        "  11  mount 'tmpfs' on '/dev/shm' (nosuid,nodev,noexec,mode=1777,size=65536k)",
        "  12  mount 'mqueue' on '/dev/mqueue' (nosuid,nodev,noexec)",
        "  13  mount 'sysfs' on '/sys' (ro,nosuid,nodev,noexec)",
        "  14  mount 'cgroup2' on '/sys/fs/cgroup' (ro,nosuid,nodev,noexec)",
        "  15  mknod '/dev/null' c 1:3 mode 0666",
        "  16  mknod '/dev/zero' c 1:5 mode 0666",
        "  17  mknod '/dev/full' c 1:7 mode 0666",
        "  18  mknod '/dev/random' c 1:8 mode 0666",
        "  19  mknod '/dev/urandom' c 1:9 mode 0666",
        "  20  mknod '/dev/tty' c 5:0 mode 0666",
        "  21  symlink '/dev/fd' to '/proc/self/fd'",
        "  22  symlink '/dev/stdin' to '/proc/self/fd/0'",
        "  23  symlink '/dev/stdout' to '/proc/self/fd/1'",
        "  24  symlink '/dev/stderr' to '/proc/self/fd/2'",
        "  25  symlink '/dev/core' to '/proc/kcore'",
        "  26  symlink '/dev/ptmx' to 'pts/ptmx'",
        "  27  pivot_root",
        "  28  open terminal as '/dev/console' and stdio",
        "  29  remount '/' (ro)",
        "  30  umask 0022",
        "  31  sethostname 'pyrunc'",
        *(
            f"{32 + i:4}  readonly '{path}'"
            for i, path in enumerate(
                ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
            )
        ),
        *(f"{37 + i:4}  mask '{path}'" for i, path in enumerate(MASKED_PATHS)),
        "  47  setrlimit RLIMIT_NOFILE 1024:1024",
        "  48  chdir '/' if root may",
        "  49  drop capabilities but 5,10,29 from the bounding set",
        "  50  setgroups none",
        "  51  setuid 0 gid 0",
        "  52  capset effective 0x20000420 permitted 0x20000420 inheritable 0x0 ambient none",
        "  53  chdir '/'",
        "  54  no_new_privs",
        "  55  say ready",
        "  56  exec 'sh'",
    ]


def names(built: Plan) -> list[str]:
    return [type(op).__name__ for op in built.ops]


def before(built: Plan, first: str, second: str) -> bool:
    order = names(built)
    return order.index(first) < order.index(second)


FILTER = LoadFilter(b"\x06\0\0\0\0\0\xff\x7f", 0)


def test_a_filter_is_loaded_in_its_order() -> None:
    without = plan({"process.noNewPrivileges": False}, load_filter=FILTER)
    assert before(without, "LoadFilter", "DropBounding")
    assert before(without, "LoadFilter", "SetIds")
    without_privileges = plan(load_filter=FILTER)
    assert names(without_privileges)[-3:] == ["LoadFilter", "Ready", "Execute"]
    assert before(without_privileges, "EnterFolder", "ForbidNewPrivileges")


def test_the_identity_is_set_in_order() -> None:
    built = plan({"process.user": {"uid": 1000, "gid": 1000}})
    order = [
        "MaskPath",
        "SetLimit",
        "TryFolder",
        "DropBounding",
        "SetGroups",
        "SetIds",
        "SetCapabilities",
        "EnterFolder",
    ]
    places = [names(built).index(name) for name in order]
    assert places == sorted(places)


def test_the_set_of_steps_is_closed() -> None:
    steps = set(model.ParentStep.__subclasses__())
    assert steps == set(STEP_LINES)
    carried_out = re.findall(r"case m\.(\w+)\(", inspect.getsource(perform))
    assert sorted(carried_out) == sorted(step.__name__ for step in steps)


MAPS = [{"containerID": 0, "hostID": 100000, "size": 65536}]
EVERYTHING = {
    "linux.namespaces": [{"type": kind} for kind in ("user", "pid", "mount", "network", "cgroup")],
    "linux.uidMappings": MAPS,
    "linux.gidMappings": MAPS,
    "linux.intelRdt": {"closID": "gold", "schemata": ["L3:0=f"]},
    "linux.netDevices": {"eth7": {"name": "eth0"}},
    "linux.seccomp": {
        "defaultAction": "SCMP_ACT_ALLOW",
        "listenerPath": "/run/agent.sock",
        "listenerMetadata": "m",
        "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_NOTIFY"}],
    },
    "process.rlimits": [{"type": "RLIMIT_CORE", "soft": 1, "hard": 2}],
    "hooks": {
        kind: [{"path": f"/hooks/{kind}"}]
        for kind in (
            "prestart",
            "createRuntime",
            "createContainer",
            "startContainer",
            "poststart",
            "poststop",
        )
    },
}
LISTENING = LoadFilter(b"\0" * 8, 8, True)


def test_the_steps_of_the_parent_are_in_the_plan() -> None:
    """A configuration that demands every step of the parent process gets all of them, in order."""
    parent = ParentOptions(record=True, cgroup_owner=100000, hook_folder="/b/rootfs")
    built = plan(EVERYTHING, parent=parent, load_filter=LISTENING)
    steps = [text for number, text in numbered(built) if "." in number]
    assert steps == [
        "write id maps uid 0:100000:65536 gid 0:100000:65536",
        "record pid and start time",
        "write the state into 'hook-state'",
        "give the cgroup to uid 100000",
        "enter resctrl group gold",
        "move links 'eth7' to 'eth0'",
        "run prestart hooks '/hooks/prestart'",
        "run createRuntime hooks '/hooks/createRuntime'",
        "run createContainer hooks '/hooks/createContainer' in the container's namespaces at "
        "'/b/rootfs'",
        "prlimit RLIMIT_CORE 1:2",
        "send the seccomp listener to '/run/agent.sock'",
    ]
    assert [op.point for op in built.ops if isinstance(op, model.Sync)] == [
        "cloned",
        "mounted",
        "before-pivot",
        "before-identity",
    ]
    order = names(built)
    assert order.index("Clone") + 1 == order.index("Sync")
    assert set(lower(built).steps) == {
        number for number, op in enumerate(built.ops, 1) if isinstance(op, model.Sync | LoadFilter)
    }


def test_an_exec_has_steps_of_its_own() -> None:
    spec = plan_spec(EVERYTHING)
    assert spec.process is not None
    built = plans.build_exec(
        spec.linux, spec.process, HOST, plans.ExecPlanOptions(load_filter=LISTENING)
    )
    assert [text for number, text in numbered(built) if "." in number] == [
        "join resctrl group gold",
        "prlimit RLIMIT_CORE 1:2",
        "send the seccomp listener to '/run/agent.sock'",
    ]


def test_a_plain_container_has_no_steps_of_its_parent() -> None:
    assert "Sync" not in names(plan()) and not lower(plan()).steps


def test_a_parents_step_is_shown_before_the_line_that_waits_for_the_parent() -> None:
    lines = show(plan(EVERYTHING, parent=ParentOptions(record=True))).splitlines()
    at = lines.index("   3  wait for the parent at 'cloned'")
    assert (
        lines[at - 5 : at][0]
        == "   3.1  parent: write id maps uid 0:100000:65536 gid 0:100000:65536"
    )
    assert lines[at - 1].startswith("   3.5  parent: move links")


def test_a_created_process_awaits_start_before_execve() -> None:
    assert names(plan(await_start=True))[-4:] == ["CheckProgram", "Ready", "AwaitStart", "Execute"]


def test_joined_namespaces_come_before_the_clone_and_user_last() -> None:
    built = plan(
        {
            "linux.namespaces": [
                {"type": "user", "path": "/u"},
                {"type": "network", "path": "/n"},
                {"type": "mount"},
                {"type": "uts"},
            ],
        }
    )
    joined = [op.kind for op in built.ops if isinstance(op, model.Join)]
    assert joined == ["net", "user"]
    assert before(built, "Join", "Clone")
    clone = next(op for op in built.ops if isinstance(op, model.Clone))
    assert clone.kinds == ("mnt", "uts")
    assert before(built, "Clone", "BecomeRoot")
    assert "LoopbackUp" not in names(built)


def test_devices_are_created_as_listed() -> None:
    built = plan(
        {
            "linux.devices": [
                {"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "fileMode": 0o600}
            ]
        }
    )
    nulls = [op for op in built.ops if isinstance(op, model.MakeDevice) and op.path == "/dev/null"]
    assert [op.mode for op in nulls] == [0o600]
    own = plan({"mounts": [{"destination": "/dev", "source": "/dev", "options": ["rbind"]}]})
    assert not [op for op in own.ops if isinstance(op, model.MakeDevice | model.Symlink)]


def test_the_oom_score_is_written_even_if_it_equals_ours() -> None:
    document = default()
    # The process that carries out the plan, a shim, may have another score than this one.
    document["process"]["oomScoreAdj"] = 0
    for host in (HOST, HOST.replace(capabilities=0), HOST.replace(in_user_namespace=True)):
        ops = plans.build(parse(document), host, RootfsFacts(), plans.StartPlanOptions()).ops
        assert [op.value for op in ops if isinstance(op, model.SetOomScore)] == [0]


@pytest.mark.parametrize(
    ("change", "score"),
    [
        ({}, -998),
        ({"capabilities": 0, "oom_score_adj": 0}, 0),
        ({"capabilities": 0, "oom_score_adj": -999}, -998),
        ({"in_user_namespace": True, "oom_score_adj": 77}, 77),
    ],
)
def test_the_pause_process_has_a_low_oom_score_where_permitted(
    change: dict[str, Any], score: int
) -> None:
    options = plans.PausePlanOptions(oom_score_adj=-998)
    ops = plans.build_pause(plan_spec().linux, HOST.replace(**change), options).ops
    assert [op.value for op in ops if isinstance(op, model.SetOomScore)] == [score]


def test_exec_joins_the_namespaces_of_the_container() -> None:
    spec = parse(default())
    assert spec.process is not None
    built = plans.build_exec(spec.linux, spec.process.replace(terminal=False), HOST)
    assert names(built)[:5] == ["Prepare", "JoinProcess", "Clone", "JoinProcess", "NewSession"]
    joined = [op.kinds for op in built.ops if isinstance(op, model.JoinProcess)]
    # cloned into the cgroup before its namespace
    assert joined == [
        ("pid", "net", "ipc", "uts", "mnt"),
        ("cgroup",),
    ]
    mapped = spec.linux.replace(namespaces=(*spec.linux.namespaces, Namespace("user")))
    built = plans.build_exec(mapped, spec.process.replace(terminal=False), HOST)
    assert [op.kinds for op in built.ops if isinstance(op, model.JoinProcess)][1] == (
        "user",
        "cgroup",
    )


def test_a_mount_label_needs_selinux_and_applies_to_file_systems_with_labels() -> None:
    with pytest.raises(InvalidSpec, match=r"linux\.mountLabel: 'a:b:c' is set, but SELinux is off"):
        plan({"linux.mountLabel": "a:b:c"})
    document = default()
    document["linux"]["mountLabel"] = "a:b:c"
    built = plans.build(parse(document), HOST.replace(selinux=True), RootfsFacts())
    labelled = [
        op
        for op in built.ops
        if isinstance(op, model.MountFs) and ("context", "a:b:c") in op.options
    ]
    assert [op.destination for op in labelled] == ["/dev", "/dev/pts", "/dev/shm"]
    assert [op.path for op in built.ops if isinstance(op, model.LabelMount)] == ["/dev/mqueue"]
    assert before(built, "MountFs", "LabelMount")
    lower(built)


@pytest.mark.parametrize("field", ["apparmorProfile", "selinuxLabel"])
def test_labels_need_their_module(field: str) -> None:
    with pytest.raises(InvalidSpec, match=f"process.{field}"):
        plan({f"process.{field}": "x"})
    document = default()
    document["process"][field] = "x"
    built = plans.build(parse(document), HOST.replace(apparmor=True, selinux=True), RootfsFacts())
    assert before(built, "SetExecLabel", "Clone")


def test_affinity_is_set_on_request() -> None:
    assert "SetAffinity" not in names(plan())
    host = HOST.replace(affinity_restricted=True)
    restricted = plans.build(parse(default()), host, RootfsFacts())
    assert model.SetAffinity() in restricted.ops
    process = Process(args=("x",), exec_cpu_affinity=CpuAffinity("0-1", "3"))
    built = plans.build_exec(parse(default()).linux, process, HOST)
    assert [op.cpus for op in built.ops if isinstance(op, model.SetAffinity)] == [(0, 1), (3,)]
    assert before(built, "SetAffinity", "JoinProcess")


def test_the_plan_of_a_pause_process_ends_with_its_filter_and_execution() -> None:
    built = plans.build_pause(
        parse(default()).linux, HOST, plans.PausePlanOptions(hostname="pod", load_filter=FILTER)
    )
    assert names(built)[-3:] == ["ForbidNewPrivileges", "LoadFilter", "ExecuteDescriptor"]
    assert "SetHostname" in names(built)


@pytest.mark.parametrize(
    "change", [{}, {"process.user": {"uid": 5}}, {"process.terminal": True}, {"process": None}]
)
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_every_plan_can_be_lowered(change: dict[str, Any], arch: str) -> None:
    built = plan(change, load_filter=FILTER, keyring="k", await_start=True)
    lowered = lower(built, arch=arch)
    assert len(lowered.program.calls) > 50
    assert sorted(lowered.numbers.values()) == list(range(3, 3 + len(lowered.numbers)))
    assert lowered.numbers.keys() >= {"root", "cgroup"}


def test_lowering_is_the_same_every_time() -> None:
    assert lower(plan()).program.encoded == lower(plan()).program.encoded


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["ro", "nosuid"], (3, 0, 0, 0)),
        (["ro", "rw"], (0, 1, 0, 0)),
        (["rw", "ro"], (1, 0, 0, 0)),
        (["noatime", "strictatime"], (0x20, 0x70, 0, 0)),
        (["relatime"], (0, 0x70, 0, 0)),
        (["rro", "rnosuid", "rsuid"], (0, 0, 1, 2)),
        (["rnoatime"], (0, 0, 0x10, 0x70)),
        (["defaults", "async", "silent", ""], (0, 0, 0, 0)),
    ],
)
def test_mount_options_are_sorted(options: list[str], expected: tuple[int, int, int, int]) -> None:
    sorted_options = mounts.MountOptions(tuple(options))
    assert (
        sorted_options.set,
        sorted_options.clear,
        sorted_options.rset,
        sorted_options.rclear,
    ) == expected
    assert sorted_options.data == []


def test_filesystem_options_on_a_bind_are_a_warning() -> None:
    warnings: list[str] = []
    mount = Mount("/x", "bind", "/y", ("bind", "size=5", "z"))
    mounts.operations(mount, 3, parse(default()).linux, HOST, RootfsFacts(), warnings)
    assert warnings == ["mounts[3]: a bind mount takes no filesystem options: size=5,z is ignored"]


WORDS = [
    *mounts.ATTRIBUTES,
    *mounts.PROPAGATION,
    *mounts.IGNORED,
    "rro",
    "rrw",
    "rnoatime",
    "rstrictatime",
    "bind",
    "rbind",
]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_the_last_of_contradicting_mount_options_wins(options: list[str]) -> None:
    sorted_options = mounts.MountOptions(tuple(options))
    for one, other, bit in (
        ("ro", "rw", 1),
        ("nosuid", "suid", 2),
        ("nodev", "dev", 4),
        ("noexec", "exec", 8),
    ):
        words = [word for word in options if word in (one, other)]
        assert bool(sorted_options.set & bit) == (words[-1:] == [one])
        assert bool(sorted_options.clear & bit) == (words[-1:] == [other])
    assert not sorted_options.set & sorted_options.clear & ~0x70


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet="/.ab", max_size=20))
def test_normal_paths_are_absolute_and_clean(path: str) -> None:
    normal = clean(path)
    assert normal.startswith("/")
    assert not {"", ".", ".."} & set(normal[1:].split("/")) or normal == "/"
    assert clean(normal) == normal


@pytest.mark.parametrize("text", ["1-", "-1", "a", "3-1", "1,,x", "٣", "0-99999", "9" * 5000])
def test_bad_cpu_lists_are_refused(text: str) -> None:
    with pytest.raises(InvalidSpec):
        cpu_list(text, "p")


def test_cpu_lists_are_parsed() -> None:
    assert cpu_list("0-3, 7", "p") == (0, 1, 2, 3, 7)
    assert cpu_list("", "p") == ()


def test_the_last_value_of_a_variable_counts_and_home_has_a_default() -> None:
    process = Process(env=("A=1", "B=2", "A=3"))
    assert environment(process, "/h") == ("B=2", "A=3", "HOME=/h")
    assert environment(Process(env=("HOME=", "X=1")), "") == ("X=1", "HOME=/")
    assert environment(Process(env=("HOME=/x",)), "/h") == ("HOME=/x",)


def test_candidates_of_a_program_follow_path() -> None:
    assert candidates(["a"], ["PATH=/x::/y"]) == ["/x/a", "./a", "/y/a"]
    assert candidates(["./a"], ["PATH=/x"]) == ["./a"]
    assert candidates(["a"], [])[0] == "/usr/local/sbin/a"


def test_a_bind_has_this_line() -> None:
    op = model.MountTree("/d", "tree:0", "/s", True, 1, 0x70, 1, 0, True, (1 << 20 | 16384,))
    assert line(op) == "bind '/s' on '/d' (peer,ro,relatime,rshared,rro)"


def test_cached_fragments_have_the_lines_of_their_plan() -> None:
    """Plans share cached parts of programs, although their lines differ. An error names the line in
    the failed plan."""
    longer = plan({"process.terminal": True}, keyring="k", parent=ParentOptions(record=True))
    for built in (plan(), longer, plan()):
        program = lower(built).program
        texts = [str(failure(program, index, errno.EIO)) for index in range(len(program.calls))]
        for number, op in enumerate(built.ops, 1):
            if isinstance(
                op, model.MaskPath | model.MakeDevice | model.MountFs | model.DropBounding
            ):
                assert any(t.startswith(line(op)) and f"plan line {number})" in t for t in texts), (
                    line(op)
                )


def test_the_cache_of_fragments_is_limited() -> None:
    for number in range(300):
        built = plan({"linux.maskedPaths": [f"/proc/{number}/{'x' * 200}"]})
        assert len(lower(built).program.calls) > 100
    cache = lowering._caches[""]
    assert len(cache._fragments) <= 200
    assert len(lower(plan()).program.encoded) < 200_000
    lowering._caches.clear()


@pytest.mark.parametrize("preserve", [0, 2])
def test_the_cached_part_of_a_mount_has_the_source_and_the_line_of_its_plan(preserve: int) -> None:
    lowering._caches.clear()
    calls = []
    # From the third plan on, the code for the mount's destination comes from a cache.
    for source in ("/pod-a", "/pod-b", "/pod-c", "/pod-d"):
        mount = model.MountTree("/d", "", source, False, set=1, propagation=(1 << 18,))
        built = plan(preserve=preserve)
        built = built.replace(ops=(*built.ops[:-2], mount, *built.ops[-2:]))
        program = lower(built).program
        calls.append(program.calls)
        assert f"{source}\0".encode() in program.encoded
        attached = [
            line.text
            for line, call in zip(program.lines, program.calls, strict=True)
            if call == "move_mount" and "'/d'" in line.text
        ]
        assert attached == [line(mount)]
    assert all(each == calls[0] for each in calls)
    lowering._caches.clear()


def test_the_cached_part_of_an_exec_has_the_lines_of_its_plan() -> None:
    lowering._caches.clear()
    spec, operations = parse(default()), []
    # From the third exec on, the code that searches for the executable comes from a cache.
    for argument in ("a", "b", "c", "d"):
        process = spec.process.replace(args=("program", argument), terminal=False)
        program = lower(plans.build_exec(spec.linux, process, HOST)).program
        assert f"{argument}\0".encode() in program.encoded
        lines = [line.text for line in program.lines]
        operations.append(list(zip(lines, program.calls, strict=True)))
    assert ("exec 'program'", "execve") in operations[0]
    assert all(each == operations[0] for each in operations)
    lowering._caches.clear()


def test_preserved_descriptors_move_the_numbers() -> None:
    assert lower(plan()).numbers["root"] == 3
    assert lower(plan(preserve=2)).numbers["root"] == 5


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        (Mount("/d", "bind", "/s", ("rbind", "rprivate")), True),
        (Mount("/d", "", "/s", ("bind", "ro")), True),
        (Mount("/d", "bind", "/s", ("rbind", "rslave")), True),
        (Mount("/d", "bind", "/s", ("rbind", "rshared")), True),
        (Mount("/d", "bind", "s", ("rbind",)), False),
        (Mount("/d", "bind", "pyrunc:shm", ("rbind",)), False),
        (Mount("/d", "bind", "/proc/1/ns/net", ("bind",)), False),
        (Mount("/d", "bind", "/s", ("rbind", "idmap")), False),
        (Mount("/d", "overlay", "/s", ()), False),
    ],
)
def test_binds_are_made_by_the_containers_process_where_possible(
    mount: Mount, expected: bool
) -> None:
    linux = parse(default()).linux
    assert mounts.may_be_opened_inside(mount, linux) is expected
    in_user = linux.replace(namespaces=(*linux.namespaces, Namespace("user")))
    assert not mounts.may_be_opened_inside(mount, in_user)


def test_shared_and_slave_binds_are_cloned_from_the_hosts_mount() -> None:
    linux = parse(default()).linux
    shared = Mount("/d", "bind", "/s", ("rbind", "rshared"))
    slave = Mount("/d", "bind", "/s", ("rbind", "rslave"))
    assert not mounts.may_be_opened_inside(shared, linux.replace(rootfs_propagation="rshared"))
    assert mounts.may_be_opened_inside(slave, linux.replace(rootfs_propagation="rshared"))
    assert not mounts.may_be_opened_inside(slave, linux.replace(rootfs_propagation="private"))
