"""Tests that pyrunc accepts every option of runc and crun, with or without a value as they do."""

from __future__ import annotations

import pytest

from pyrunc.cli.table import FLAG, GLOBAL, TRISTATE, VERBS

# verb -> options; `!` marks one that takes no value. runc 1.5.2 `VERB --help`.
RUNC = {
    "": "debug! log log-format root systemd-cgroup! rootless help! h! version! v!",
    "create": (
        "bundle b console-socket pidfd-socket pid-file no-pivot! no-new-keyring! preserve-fds"
    ),
    "run": (
        "bundle b console-socket pidfd-socket detach! d! keep! pid-file no-subreaper! no-pivot! "
        "no-new-keyring! preserve-fds"
    ),
    "exec": (
        "console-socket pidfd-socket cwd env e tty! t! user u additional-gids g process p detach! "
        "d! pid-file process-label apparmor no-new-privs! cap c preserve-fds cgroup "
        "ignore-paused!"
    ),
    "kill": "all! a!",
    "delete": "force! f!",
    "events": "interval stats!",
    "ps": "format f",
    "update": (
        "resources r blkio-weight cpu-period cpu-quota cpu-burst cpu-share cpu-rt-period "
        "cpu-rt-runtime cpuset-cpus cpuset-mems memory cpu-idle memory-reservation memory-swap "
        "pids-limit l3-cache-schema mem-bw-schema"
    ),
    "list": "format f quiet! q!",
    "spec": "bundle b rootless!",
    "state": "",
    "start": "",
    "pause": "",
    "resume": "",
    "features": "",
    "checkpoint": (
        "image-path work-path parent-path leave-running! tcp-established! tcp-skip-in-flight! "
        "link-remap! ext-unix-sk! shell-job! lazy-pages! status-fd page-server file-locks! "
        "pre-dump! manage-cgroups-mode empty-ns auto-dedup!"
    ),
    "restore": (
        "console-socket image-path work-path tcp-established! ext-unix-sk! shell-job! file-locks! "
        "manage-cgroups-mode bundle b detach! d! pid-file no-subreaper! no-pivot! empty-ns "
        "auto-dedup! lazy-pages! lsm-profile lsm-mount-context"
    ),
}
# crun 1.8.1, what runc does not have; `--tty[=TTY]` is a flag here.
CRUN = {
    "": "cgroup-manager",
    "create": "config f no-subreaper!",
    "run": "config f",
    "kill": "regex! r!",
    "delete": "regex! r!",
    "spec": "file f",
    "update": "kernel-memory kernel-memory-tcp",
}
CASES = [
    (peer, verb, options)
    for peer, table in (("runc", RUNC), ("crun", CRUN))
    for verb, options in table.items()
]


@pytest.mark.parametrize(("peer", "verb", "options"), CASES)
def test_options_of_other_tools_are_accepted(peer: str, verb: str, options: str) -> None:
    ours = {
        name: option.kind
        for option in (VERBS[verb].options if verb else GLOBAL)
        for name in option.names
    }
    theirs = {word.rstrip("!"): word.endswith("!") for word in options.split()}
    assert not theirs.keys() - ours.keys(), f"missing in {verb}"
    assert {name: ours[name] in (FLAG, TRISTATE) for name in theirs} == theirs
