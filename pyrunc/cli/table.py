"""The table of verbs and options. The fast parser and click's help read it. Each verb names the
function that runs it.

Names and meanings are runc's where runc has them, because containerd, podman and CRI-O use them.
crun's additions that podman uses are here as well. `fast` verbs never load click.
"""

from __future__ import annotations

from pyrunc.spec.value import Value

FLAG, TRISTATE, TEXT, NUMBER, LIST = "flag", "tristate", "text", "number", "list"


class Option(Value):
    """One option.

    - `spelling`: the long name, then the short one
    - `kind`: FLAG, TRISTATE (a flag, None without it), TEXT, NUMBER (int), LIST (may be repeated)
    - `default`: the value without the option
    - `metavar`: the value's name in the help
    """

    spelling: str
    kind: str
    help: str
    default: object = None
    metavar: str = ""

    @property
    def names(self) -> list[str]:
        """Return the long name, then the short one."""
        return self.spelling.split()

    @property
    def key(self) -> str:
        """Return the key of the option's parsed value: `pid_file` for `--pid-file`."""
        return self.names[0].replace("-", "_")

    @property
    def absent(self) -> object:
        """Return the value that the option has on a command line that does not contain it."""
        return {FLAG: False, LIST: ()}.get(self.kind, self.default)


class Verb(Value):
    """One verb.

    - `work`: the function that runs the verb, as `module:function`
    - `arguments`: the arguments' names. A last name that ends in `...` takes any number of
      arguments.
    - `required`: how many arguments a command line must have; None for all
    - `leading`: options end at the first argument, because another command's command line begins
      there
    - `fast`: the verb runs without click
    """

    name: str
    help: str
    work: str
    arguments: tuple[str, ...] = ("ID",)
    options: tuple[Option, ...] = ()
    required: int | None = None
    leading: bool = False
    fast: bool = True

    @property
    def least(self) -> int:
        """Return the smallest number of arguments."""
        return len(self.arguments) if self.required is None else self.required

    @property
    def most(self) -> int | None:
        """Return the largest number of arguments; None for any number."""
        endless = self.arguments and self.arguments[-1].endswith("...")
        return None if endless else len(self.arguments)


GLOBAL = (
    Option("root", TEXT, "folder of the containers' state", metavar="DIR"),
    Option("log", TEXT, "also write messages to this file", metavar="FILE"),
    Option("log-format", TEXT, "format of the log file: text or json", default="text"),
    Option("log-level", TEXT, "debug, info, warning or error", default=""),
    Option("debug", FLAG, "more messages"),
    Option("systemd-cgroup", FLAG, "let systemd make the cgroup: cgroupsPath is slice:prefix:name"),
    Option("cgroup-manager", TEXT, "cgroupfs, systemd or disabled", default="cgroupfs"),
    Option(
        "missing-controllers",
        TEXT,
        "for a limit whose controller is not on cgroup v2: error or warn",
        default="error",
    ),
    Option("rootless", TEXT, "true, false or auto", default="auto"),
    Option("criu", TEXT, "has no effect: pyrunc searches criu in $PATH", metavar="FILE"),
    Option("version v", FLAG, "print the version"),
    Option("help h", FLAG, "print this help"),
)
HELP = Option("help h", FLAG, "print this help")

_BUNDLE = Option(
    "bundle b", TEXT, "folder with config.json and the root filesystem", default=".", metavar="DIR"
)
_PROCESS = (
    Option("console-socket", TEXT, "unix socket that gets the terminal's master", metavar="SOCKET"),
    Option("pidfd-socket", TEXT, "unix socket that gets a pidfd of the process", metavar="SOCKET"),
    Option("pid-file", TEXT, "write the pid to FILE", metavar="FILE"),
    Option("no-subreaper", FLAG, "do not become a subreaper"),
)
_PRESERVE_FDS = Option(
    "preserve-fds", NUMBER, "pass N more descriptors, from 3 up", default=0, metavar="N"
)
_REGEX = Option("regex r", FLAG, "ID is a regular expression for several containers")
_FORMAT = Option("format f", TEXT, "table or json", default="table")
_DETACH = Option("detach d", FLAG, "return when the command runs")

_CREATE = (
    _BUNDLE,
    Option(
        "config f", TEXT, "configuration file instead of the bundle's config.json", metavar="FILE"
    ),
    *_PROCESS,
    Option("no-pivot", FLAG, "chroot instead of pivot_root (root on a ramdisk)"),
    Option("no-new-keyring", FLAG, "keep the caller's session keyring"),
    _PRESERVE_FDS,
    Option("trace", TEXT, "write the time of each operation of the plan to FILE", metavar="FILE"),
)
_RESOURCES = (
    Option("resources r", TEXT, "JSON file with linux.resources, - for stdin", metavar="FILE"),
    Option("blkio-weight", TEXT, "10 to 1000"),
    Option("cpu-period", TEXT, "microseconds"),
    Option("cpu-quota", TEXT, "microseconds per period, -1 for no limit"),
    Option("cpu-burst", TEXT, "microseconds"),
    Option("cpu-share", TEXT, "2 to 262144, 1024 is the usual share"),
    Option("cpu-rt-period", TEXT, "cgroup v1 only"),
    Option("cpu-rt-runtime", TEXT, "cgroup v1 only"),
    Option("cpu-idle", TEXT, "1: run only when the CPU is otherwise idle"),
    Option("cpuset-cpus", TEXT, "such as 0-3,7"),
    Option("cpuset-mems", TEXT, "memory nodes"),
    Option("memory", TEXT, "bytes, or with k, m, g; -1 for no limit"),
    Option("memory-reservation", TEXT, "bytes that are protected from reclaim"),
    Option("memory-swap", TEXT, "memory and swap together, -1 for no limit"),
    Option("kernel-memory", TEXT, "has no effect"),
    Option("kernel-memory-tcp", TEXT, "has no effect"),
    Option("pids-limit", TEXT, "number of processes, -1 for no limit"),
    Option("l3-cache-schema", TEXT, "Intel RDT: line L3 of the schemata"),
    Option("mem-bw-schema", TEXT, "Intel RDT: line MB of the schemata"),
)

_IMAGES = (
    Option("image-path", TEXT, "folder of CRIU's image files (./checkpoint)", metavar="DIR"),
    Option("work-path", TEXT, "folder of CRIU's logs", metavar="DIR"),
    Option("tcp-established", FLAG, "allow open TCP connections"),
    Option("ext-unix-sk", FLAG, "allow unix sockets to outside the container"),
    Option("shell-job", FLAG, "allow a terminal from outside the container"),
    Option("file-locks", FLAG, "allow file locks"),
    Option("lazy-pages", FLAG, "transfer memory on demand, after the restore"),
    Option("link-remap", FLAG, "allow files that were deleted"),
    Option("auto-dedup", FLAG, "remove from earlier dumps the pages that a later dump has"),
    Option("manage-cgroups-mode", TEXT, "soft, full, strict or ignore", metavar="MODE"),
    Option("empty-ns", LIST, "network: leave the namespace empty", metavar="NAMESPACE"),
)

VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "create",
            "create a container, which then waits for start",
            "container:create",
            options=_CREATE,
        ),
        Verb("start", "run the command of a created container", "container:start"),
        Verb(
            "run",
            "create and start a container",
            "container:run",
            options=(
                *_CREATE,
                _DETACH,
                Option("keep", FLAG, "do not delete the container when it ends"),
            ),
        ),
        Verb("state", "print a container's state as JSON", "container:state"),
        Verb(
            "kill",
            "send a signal to a container (TERM)",
            "container:kill",
            ("ID", "SIGNAL"),
            (
                Option("all a", FLAG, "send it to all processes of the container"),
                _REGEX,
            ),
            required=1,
            leading=True,
        ),
        Verb(
            "delete",
            "remove a stopped container",
            "container:delete",
            options=(
                Option(
                    "force f", FLAG, "also delete a running container; a missing one is no error"
                ),
                _REGEX,
            ),
        ),
        Verb(
            "exec",
            "run another command in a container",
            "execute:execute",
            ("ID", "COMMAND..."),
            (
                Option("process p", TEXT, "the process as JSON", metavar="FILE"),
                *_PROCESS,
                _DETACH,
                Option("tty t", FLAG, "allocate a terminal"),
                Option("cwd", TEXT, "working directory", metavar="DIR"),
                Option("env e", LIST, "NAME=VALUE", metavar="ENTRY"),
                Option("user u", TEXT, "UID or UID:GID"),
                Option("additional-gids g", LIST, "one more group", metavar="GID"),
                Option("cap c", LIST, "one more capability"),
                Option("no-new-privs", TRISTATE, "set no_new_privs; =false: do not set it"),
                Option("apparmor", TEXT, "AppArmor profile"),
                Option("process-label", TEXT, "SELinux label"),
                _PRESERVE_FDS,
                Option("cgroup", TEXT, "cgroup below the container's", metavar="PATH"),
                Option("ignore-paused", FLAG, "allow a paused container"),
            ),
            required=1,
            leading=True,
        ),
        Verb("pause", "freeze all processes of a container", "update:pause"),
        Verb("resume", "thaw a paused container", "update:resume"),
        Verb("update", "change a running container's limits", "update:update", options=_RESOURCES),
        Verb(
            "ps",
            "list a container's processes",
            "inspect:ps",
            ("ID", "PS-ARGUMENTS..."),
            (_FORMAT,),
            required=1,
            leading=True,
        ),
        Verb(
            "events",
            "print usage every few seconds, and OOM kills",
            "inspect:events",
            options=(
                Option("interval", TEXT, "time between two readings", default="5s"),
                Option("stats", FLAG, "print usage once"),
            ),
        ),
        Verb(
            "checkpoint",
            "write a running container to files with CRIU, and destroy it",
            "migrate:checkpoint",
            options=(
                *_IMAGES,
                Option("leave-running", FLAG, "keep the container running"),
                Option("pre-dump", FLAG, "write memory only, and keep the container running"),
                Option(
                    "parent-path",
                    TEXT,
                    "folder of an earlier pre-dump, relative to --image-path",
                    metavar="DIR",
                ),
                Option("page-server", TEXT, "send memory to a page server", metavar="ADDRESS:PORT"),
                Option(
                    "status-fd",
                    TEXT,
                    "descriptor to which CRIU writes when lazy pages can be fetched",
                    metavar="FD",
                ),
                Option(
                    "tcp-skip-in-flight", FLAG, "leave out connections that are not yet established"
                ),
            ),
        ),
        Verb(
            "restore",
            "restore a container from a checkpoint",
            "migrate:restore",
            options=(
                *_IMAGES,
                _BUNDLE,
                _DETACH,
                *_PROCESS,
                Option("no-pivot", FLAG, "has no effect"),
                Option("tcp-close", FLAG, "close TCP connections instead of restoring them"),
                Option(
                    "lsm-profile", TEXT, "apparmor:PROFILE or selinux:LABEL", metavar="TYPE:NAME"
                ),
                Option("lsm-mount-context", TEXT, "SELinux context of mounts", metavar="CONTEXT"),
            ),
        ),
        Verb("features", "print the features of this runtime as JSON", "inspect:features", ()),
        Verb(
            "list",
            "list containers",
            "inspect:list",
            (),
            (
                _FORMAT,
                Option("quiet q", FLAG, "print ids only"),
            ),
            fast=False,
        ),
        Verb(
            "plan",
            "print the plan of a create, one line per operation, without creating",
            "plan:plan",
            ("BUNDLE", "OTHER"),
            (
                Option("format f", TEXT, "text or json", default="text"),
                Option("json", FLAG, "the same as --format json"),
                Option("diff", FLAG, "print how the plan of OTHER differs; exit code 1 if it does"),
            ),
            required=0,
            fast=False,
        ),
        Verb(
            "why",
            "print the lines of config.json behind each operation of the plan",
            "plan:why",
            ("BUNDLE",),
            (Option("json", FLAG, "as JSON"),),
            required=0,
            fast=False,
        ),
        Verb(
            "spec",
            "write a default config.json",
            "inspect:spec",
            (),
            (
                Option("bundle b", TEXT, "folder to write it to", default=".", metavar="DIR"),
                Option("file f", TEXT, "name of the file instead of config.json", metavar="FILE"),
                Option("rootless", FLAG, "for a user without privileges"),
            ),
            fast=False,
        ),
    )
}
