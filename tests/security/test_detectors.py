"""Takes each defence out of a copy of the program and checks that its attack's test fails there: an
attack that cannot succeed proves nothing.

No mutation takes out a defence whose absence could hurt the machine, such as the check of
cgroupsPath (ending a container in the root group would kill all processes of the machine). A
mutation is a piece of source text and its replacement; a text that no longer exists is an error.
Defences that need more than one edit were tried with runc 1.1.5 of Debian, which fails two tests of
test_dev.py: test_dev_as_a_link_is_not_followed (CVE-2026-41579) and
test_a_null_that_is_no_null_device_is_refused[file] (CVE-2025-31133). PYRUNC_RUNTIME=runc repeats
this.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project_copy import REPOSITORY, ProjectCopy
from tests.system.harness import reap

Edit = tuple[str, str, str]

PROC_CHECK = 'macros.require(low.a, kind, "ne", mnt.PROC_SUPER_MAGIC, EPERM, note)'
TREE_CHECK = (
    'macros.require(a, a.field(low.scratch, 0, 8), "eq", mnt.PROC_SUPER_MAGIC, EPERM, note)'
)
INODE_CHECK = 'macros.require(a, inode, "eq", INODE_OF_PROC, EPERM, note)'
NULL_CHECK = 'macros.require_device(low.a, low.null, 1, 3, "/dev/null")'
CLOSE_CGROUP = 'low.close(low.numbers["cgroup"])'
LOWER = "pyrunc/plan/lower_process.py"
MOUNTS = "pyrunc/plan/lower_mount.py"

MUTATIONS: dict[str, tuple[list[Edit], str]] = {
    "destinations are opened by path": (
        [
            (
                "pyrunc/program/macros.py",
                "IN_ROOT = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS",
                "IN_ROOT = 0",
            ),
            (
                "pyrunc/program/macros.py",
                "BENEATH = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS",
                "BENEATH = 0",
            ),
        ],
        "test_mounts.py::test_a_destination_swapped_during_the_mount_stays_in_the_root",
    ),
    "links in destinations lead out": (
        [
            (
                "pyrunc/program/macros.py",
                "IN_ROOT = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS",
                "IN_ROOT = 0",
            ),
            (
                "pyrunc/program/macros.py",
                "BENEATH = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS",
                "BENEATH = 0",
            ),
        ],
        "test_dev.py::test_dev_as_a_link_is_not_followed",
    ),
    "procfs goes where a link leads": (
        [
            (
                "pyrunc/plan/lowering.py",
                "flags = f.O_PATH | self.o_directory | self.o_nofollow",
                "flags = f.O_PATH | self.o_directory",
            ),
            (
                "pyrunc/plan/lowering.py",
                "resolve = IN_ROOT | f.RESOLVE_NO_SYMLINKS",
                "resolve = IN_ROOT",
            ),
        ],
        "test_procfs.py::test_proc_as_a_link_of_the_image_is_refused",
    ),
    "mounts land inside procfs": (
        [(MOUNTS, PROC_CHECK, "")],
        "test_procfs.py::test_a_volume_that_a_link_leads_into_proc_is_refused",
    ),
    "anything is bound to /proc": (
        [(MOUNTS, TREE_CHECK, ""), (MOUNTS, INODE_CHECK, "")],
        "test_procfs.py::test_a_volume_over_proc_is_refused",
    ),
    "sysctls by the container's /proc": (
        [
            (
                LOWER,
                'macros.open_at(a, low.numbers["proc"], path, f.O_WRONLY, resolve=resolve)',
                'macros.open_at(a, f.AT_FDCWD, f"/proc/{path}", f.O_WRONLY, resolve=0)',
            )
        ],
        "test_procfs.py::test_sysctls_are_not_written_through_the_containers_proc",
    ),
    "anything is procfs": (
        [(LOWER, 'require_proc(low, proc, "/proc is no procfs")', "pass")],
        "test_procfs.py::test_the_launcher_refuses_a_proc_that_is_no_procfs",
    ),
    "own files by their paths": (
        [
            (
                LOWER,
                "beneath = f.RESOLVE_BENEATH | f.RESOLVE_NO_MAGICLINKS | f.RESOLVE_NO_XDEV",
                "beneath = 0",
            )
        ],
        "test_procfs.py::test_files_of_the_process_are_written_beneath_proc_without_links",
    ),
    "sysctl values of several lines": (
        [("pyrunc/spec/check.py", 'if "\\n" in value:', "if False:")],
        "test_procfs.py::test_a_sysctls_value_with_a_second_setting_is_refused",
    ),
    "a source is looked up twice": (
        [(MOUNTS, "links = f.RESOLVE_NO_SYMLINKS", "links = 0")],
        "test_mounts.py::test_a_source_swapped_during_create_is_not_mounted",
    ),
    "a host path is made by its name": (
        [
            (
                "cri_server/spec/sources.py",
                "        for name in resolved.strip",
                "        os.makedirs(resolved, exist_ok=True)\n        for name in ''.strip",
            )
        ],
        "test_server.py::test_a_missing_source_is_not_made_behind_a_swapped_link",
    ),
    "a restart takes what the server finds": (
        [
            (
                "cri_server/cli/pods/restart.py",
                "sources.check(client, identifier, config, without_links)",
                "pass",
            )
        ],
        "test_command_line.py::test_a_restart_follows_no_link_of_the_container",
    ),
    "a container's file is opened unseen": (
        [
            (
                "pyrunc/kernel/path.py",
                'raise OSError(errno.ESTALE, "not a regular file any more", name)',
                "pass",
            )
        ],
        "test_command_line.py::test_cp_does_not_open_a_file_that_became_a_device",
    ),
    "the shim opens host paths again": (
        [
            (
                "cri_server/containers/launch.py",
                "for bind in binds\n        if not (bind.made_inside",
                "for bind in ()\n        if not (bind.made_inside",
            ),
            ("pyrunc/compile/sources.py", "if mount.source in request.sources:", "if False:"),
        ],
        "test_server.py::test_a_source_swapped_before_the_shim_opens_its_files_is_not_mounted",
    ),
    "any null is good": (
        [
            (MOUNTS, NULL_CHECK, ""),
            (MOUNTS, 'macros.require_device(low.a, opened, 1, 3, "/dev/null")', ""),
        ],
        "test_dev.py::test_a_null_that_is_no_null_device_is_refused",
    ),
    "any null is good, the race": (
        [
            (MOUNTS, NULL_CHECK, ""),
            (MOUNTS, 'macros.require_device(low.a, opened, 1, 3, "/dev/null")', ""),
        ],
        "test_dev.py::test_a_swapped_null_is_not_used_as_a_mask",
    ),
    "the console follows a link": (
        [(MOUNTS, "place = _console_place(low)", 'place = low.place("/dev/console", False)')],
        "test_dev.py::test_console_as_a_link_is_not_followed",
    ),
    "any device is the default one": (
        [(MOUNTS, "_require_same_device(low, op, folder, name, kind)", "pass")],
        "test_dev.py::test_a_file_in_place_of_a_default_device_is_refused",
    ),
    "newcomers are dumpable": (
        [
            (
                "pyrunc/program/macros.py",
                'a.sys("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)',
                'a.sys("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)',
            )
        ],
        "test_newcomer.py::test_a_process_that_waits_for_start_cannot_be_inspected",
    ),
    "newcomers are dumpable, exec": (
        [
            (
                "pyrunc/program/macros.py",
                'a.sys("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)',
                'a.sys("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)',
            )
        ],
        "test_newcomer.py::test_an_entering_process_cannot_be_inspected",
    ),
    "the group's folder stays open": (
        [
            (LOWER, CLOSE_CGROUP, "pass"),
            (LOWER, "macros.close_all_from(low.a, 3 + low.preserve, keep)", "pass"),
        ],
        "test_descriptors.py::test_a_created_container_has_no_descriptor_of_the_host",
    ),
    "the group's folder stays open, exec": (
        [(LOWER, CLOSE_CGROUP, "pass")],
        "test_descriptors.py::test_an_entering_process_has_no_descriptor_of_the_host",
    ),
    "getcwd is not asked": (
        [
            (LOWER, CLOSE_CGROUP, "pass"),
            (LOWER, 'macros.require(a, first, "eq", ord("/"), ENOENT, OUTSIDE)', ""),
        ],
        "test_descriptors.py::test_the_working_directory_of_an_exec_is_not_on_the_host",
    ),
    "nothing is closed before execve": (
        [
            (
                LOWER,
                "macros.close_all_from(a, 3 + op.preserve, keep, may_fail=low.filtered)",
                "pass",
            ),
            (LOWER, "macros.close_all_from(low.a, 3 + low.preserve, keep)", "pass"),
        ],
        "test_descriptors.py::test_a_process_has_only_its_three_descriptors",
    ),
    "the launcher is its file": (
        [
            (
                "pyrunc/program/launch.py",
                "return _fd.open_sealed_executable(name, _fd.read_file(path))",
                "return os.open(path, os.O_RDONLY | os.O_CLOEXEC)",
            )
        ],
        "test_executable.py::test_a_created_container_runs_a_sealed_memfd",
    ),
    "the launcher is its file, the exploit": (
        [
            (
                "pyrunc/program/launch.py",
                "return _fd.open_sealed_executable(name, _fd.read_file(path))",
                "return os.open(path, os.O_RDONLY | os.O_CLOEXEC)",
            )
        ],
        "test_executable.py::test_executables_cannot_be_overwritten_through_another_process",
    ),
    "the group list is the caller's": (
        [("pyrunc/plan/identity.py", "ops.append(model.SetGroups(user.additional_gids))", "pass")],
        "test_identity.py::test_the_kernel_shows_the_configured_groups",
    ),
    "everything is inheritable": (
        [
            (
                "pyrunc/plan/identity.py",
                "effective & permitted, permitted, inheritable, raisable",
                "effective & permitted, permitted, permitted, raisable",
            )
        ],
        "test_identity.py::test_no_capability_is_inheritable",
    ),
    "file capabilities are inherited": (
        [
            (
                "pyrunc/plan/identity.py",
                "effective & permitted, permitted, inheritable, raisable",
                "effective & permitted, permitted, permitted, raisable",
            )
        ],
        "test_identity.py::test_a_file_with_an_inheritable_capability_adds_no_capability",
    ),
    "users are read as Python reads numbers": (
        [
            (
                "pyrunc/cli/process.py",
                "if not (digits.isascii() and digits.isdigit()) or int(digits) > MAX_ID:",
                "if not digits.isdigit():",
            )
        ],
        "test_identity.py::test_a_user_must_be_a_whole_number",
    ),
    "files of an image are opened unseen": (
        [
            (
                "pyrunc/kernel/path.py",
                (
                    "    with closing_fd(open_in_root(root_fd, path)) as place:\n"
                    "        return read_regular"
                ),
                (
                    "    with closing_fd("
                    "open_in_root(root_fd, path, O_RDONLY | os.O_NONBLOCK)) as place:\n"
                    "        return read_regular"
                ),
            )
        ],
        "test_identity.py::test_a_hostile_passwd_does_no_harm",
    ),
    "files of an image are looked up on the host": (
        [("pyrunc/kernel/path.py", "RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)", "0)")],
        "test_identity.py::test_a_hostile_passwd_does_no_harm",
    ),
    "limits name any file": (
        [
            (
                "pyrunc/cgroups/convert.py",
                'if "/" in file or "\\0" in file or not controller or not dot or not parameter:',
                "if False:",
            ),
            (
                "pyrunc/kernel/cgroup.py",
                'if "/" in file or file in ("", ".", "..") or "\\0" in file:',
                "if False:",
            ),
        ],
        "test_cgroups.py::test_names_of_limits_cannot_be_other_files",
    ),
    "no device filter": (
        [("pyrunc/compile/descriptors.py", "cgroup.set_devices(rules)", "pass")],
        "test_cgroups.py::test_devices_of_the_host_cannot_be_opened",
    ),
    "no separate session": (
        [(LOWER, 'low.a.sys("setsid")', "pass")],
        "test_calls.py::test_a_container_cannot_type_into_the_callers_terminal",
    ),
    "no separate keyring": (
        [("pyrunc/plan/build.py", "    if options.keyring:\n", "    if False:\n")],
        "test_calls.py::test_a_container_cannot_find_keys_of_the_caller",
    ),
    "images are what CRIU opens": (
        [("pyrunc/checkpoint/criu_images.py", "if not S_ISREG(mode):", "if False:")],
        "test_checkpoints.py::test_images_that_are_no_regular_files_are_refused",
    ),
    "images are what CRIU opens, dump": (
        [("pyrunc/checkpoint/criu_images.py", "if not S_ISREG(mode):", "if False:")],
        "test_checkpoints.py::test_a_dump_does_not_write_through_links",
    ),
    "no filter": (
        [("pyrunc/compile/descriptors.py", "    if not seccomp:\n", "    if True:\n")],
        "test_calls.py::test_a_filter_covers_the_x32_and_i386_tables",
    ),
    "no new privileges only for the first": (
        [("pyrunc/plan/identity.py", "    if process.no_new_privileges:\n", "    if False:\n")],
        "test_calls.py::test_no_new_privileges_applies_to_exec",
    ),
    "errors hold what they hold": (
        [("pyrunc/cli/log.py", ".translate(VISIBLE)", ".translate({})")],
        "test_calls.py::test_errors_have_no_escape_sequences_of_a_container",
    ),
    "cells hold what they hold": (
        [("cri_server/cli/output/show.py", ".translate(VISIBLE)", ".translate({})")],
        "test_calls.py::test_tables_have_no_escape_sequences_of_a_container",
    ),
    "the state folder is for all": (
        [
            (
                "pyrunc/container/state.py",
                "os.mkdir(folder, CLAIMED)",
                "os.mkdir(folder, CLAIMED | 0o011)",
            )
        ],
        "test_requests.py::test_the_state_is_only_accessible_to_its_owner",
    ),
    "pids are trusted": (
        [
            (
                "pyrunc/container/status.py",
                "if not alive(state.pid, state.start_time):",
                "if not state.pid:",
            )
        ],
        "test_requests.py::test_a_tampered_state_does_not_signal_another_process",
    ),
    "deep JSON is not caught": (
        [("pyrunc/jsontext.py", "except RecursionError:", "except ZeroDivisionError:")],
        "test_requests.py::test_a_configuration_that_is_no_object_is_refused",
    ),
    "numbers may be names": (
        [
            (
                "cri_server/spec/user.py",
                "    if not _is_number(text):\n        for",
                "    if True:\n        for",
            )
        ],
        "test_server.py::test_a_numeric_user_is_never_taken_for_a_name",
    ),
    "logs follow links": (
        [("pyrunc/shim/log_file.py", "flags | os.O_NOFOLLOW", "flags")],
        "test_server.py::test_a_link_at_the_path_of_a_log_is_not_followed",
    ),
    "folders of logs follow links": (
        [
            ("pyrunc/shim/log_file.py", "FOLDER | os.O_NOFOLLOW", "FOLDER"),
            (
                "pyrunc/kernel/path.py",
                "O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | O_CLOEXEC",
                "O_PATH | os.O_DIRECTORY | O_CLOEXEC",
            ),
        ],
        "test_server.py::test_links_in_the_folders_of_a_log_are_not_followed",
    ),
    "annotations are copied": (
        [
            (
                "cri_server/spec/build.py",
                '        "io.kubernetes.cri.container-type": "container",\n',
                (
                    "        **inputs.sandbox.annotations,"
                    ' "io.kubernetes.cri.container-type": "container",\n'
                ),
            )
        ],
        "test_server.py::test_annotations_do_not_change_the_specification",
    ),
    "output without an end": (
        [
            (
                "cri_server/containers/exec.py",
                "OUTPUT_LIMIT_BYTES = (16 << 20) - (64 << 10)",
                "OUTPUT_LIMIT_BYTES = 1 << 40",
            )
        ],
        "test_server.py::test_endless_output_of_an_exec_is_cut",
    ),
    "folders keep their modes": (
        [("cri_server/store/paths.py", "os.chmod(path, mode)", "pass")],
        "test_server.py::test_other_users_cannot_reach_sockets_and_folders",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_finds_its_source_text(name: str) -> None:
    # The slow test below would notice a changed text, too, but runs seldom.
    for file, old, _ in MUTATIONS[name][0]:
        assert old in (REPOSITORY / file).read_text(), f"{file} has changed: rewrite the mutation"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_attack_succeeds_without_the_defence(name: str, tmp_path: Path) -> None:
    """When a copy of the program lacks one defence, the test of the attack fails in this copy by
    its own assertion."""
    edits, test = MUTATIONS[name]
    copy = ProjectCopy(tmp_path / "copy")
    for file, old, new in edits:
        text = (copy.folder / file).read_text()
        (copy.folder / file).write_text(text.replace(old, new or "pass"))
    result = copy.run_tests(f"tests/security/{test}", temporary=tmp_path / "t")
    reap(5.0)  # orphans of the copy's server
    # a failure of the test, or of a fixture that looks at the canary and at the host afterwards
    wrong = "1 failed" in result.stdout or "1 error" in result.stdout
    assert result.returncode == 1 and wrong, (
        f"{test} passes without its defence:\n{result.stdout[-3000:]}"
    )
    assert "ImportError" not in result.stdout and "SyntaxError" not in result.stdout, result.stdout[
        -3000:
    ]
