"""The errors of this program: their classes by who must act, and the specific ones among them."""

from __future__ import annotations

from cri_server.explain.model import Page

_E = "pyrunc.errors."

ERRORS = (
    Page(
        "invalid-argument", "errors", "The request cannot be right",
        "Whatever the node's state, this request is refused: a field is missing, out of range, or contradicts another. The text names the field.",
        "Mend the request. From kubelet it is the pod's manifest, or a newer field that this version does not take; `pyrunc-cri run --lenient` warns where a manifest asks for what it cannot do.",
        "the caller", "INVALID_ARGUMENT", (_E + "InvalidArgument", "pyrunc.cli.parse.Misuse"),
    ),
    Page(
        "invalid-spec", "errors", "A value of a configuration file is wrong",
        "The text begins with the place: `FILE:table.key` of the server's configuration, or the JSON path in a bundle's config.json, such as `process.rlimits[0].type`.",
        "Mend that value; `pyrunc-cri serve --help` and /etc/pyrunc/config.toml explain every key.",
        "the caller", "INVALID_ARGUMENT", (_E + "InvalidSpec", "cri_server.cli.manifest.config_maps.Unsupported"),
    ),
    Page(
        "not-found", "errors", "The thing that was named does not exist",
        "No sandbox, container, image or file of this name. An id's prefix that fits several is none of them.",
        "List what there is: `pyrunc-cri pods`, `ps -a`, `image list`. CreateContainer never pulls: the image must be on the node before.",
        "the caller", "NOT_FOUND", (_E + "NotFound",),
    ),
    Page(
        "already-exists", "errors", "The name is taken by something else",
        "A sandbox's name, namespace, uid and attempt, or a container's name and attempt in its sandbox, belong to one with another configuration, or to one that is not ready any more. The same request again would have got the first one's id.",
        "kubelet takes the next attempt by itself. By hand: remove the old one (`pyrunc-cri rm`), or choose another name.",
        "the caller", "ALREADY_EXISTS", (_E + "AlreadyExists",),
        patterns=(r"pod \S+ exists", r"name .*is (reserved|taken|in use)"),
    ),
    Page(
        "wrong-state", "errors", "The thing exists, but not in the state that the operation needs",
        "Such as a container that was started already, an exec in one that does not run, an image that is in use, a second server on the same folders.",
        "`pyrunc-cri ps -a` and `inspect` show the state; the text names what is in the way.",
        "the caller", "FAILED_PRECONDITION", (_E + "WrongState", "cri_server.nri.owners.Conflict"),
    ),
    Page(
        "kernel", "errors", "A system call failed",
        "`CALL 'OBJECT': ERRNO (note)`: the manual page's name of the call, what it was about, the kernel's word, and for a container's start the line of its plan, which `pyrunc plan BUNDLE` prints.",
        "Explain the errno (`pyrunc-cri explain ENOSPC`); `pyrunc-cri doctor` finds the usual reasons; dmesg has what the kernel says beside it.",
        "the node's owner", "INTERNAL", (_E + "KernelError", "pyrunc.program.errors.OperationFailed"),
    ),
    Page(
        "resource-exhausted", "errors", "Something bounded has run out",
        "Disk space, inodes, addresses of the network, descriptors, tokens, calls at once: the text says which, and how much is kept for the node.",
        "For the disk `pyrunc-cri gc`; for addresses more ranges or fewer pods; for descriptors LimitNOFILE= in the unit.",
        "the node's owner", "RESOURCE_EXHAUSTED", (_E + "ResourceExhausted",),
    ),
    Page(
        "unsupported", "errors", "Neither this build nor this kernel can do it",
        "The request is right, but needs a feature that is not built or that the kernel lacks; the text says which. A client says it of a server that does not know its call: an older one, or another runtime.",
        "`pyrunc-cri doctor` and `pyrunc features` show what there is.",
        "the caller", "UNIMPLEMENTED", (_E + "Unsupported", "cri_server.cli.connection.client.Unsupported"),
    ),
    Page(
        "peer", "errors", "Another program broke its contract",
        "A registry, a CNI plugin, a hook, systemd or nft answered with an error or with nonsense. The text quotes it.",
        "Look at that program: its log, its version, its configuration.",
        "the peer's owner", "UNKNOWN", (_E + "PeerError", "cni_plugins.protocol.errors.CniError"),
    ),
    Page(
        "unavailable", "errors", "A process of ours is gone",
        "The shim, a zygote or a worker ended while a request went through it. Pods of a lost shim go on in another one; what it was doing for this request is ended.",
        "Try again: another process is started. If it comes back, look for the out-of-memory killer in dmesg and for the reason in the server's log.",
        "the node's owner", "UNAVAILABLE", (_E + "Unavailable", "pyrunc.shim.worker.WorkerLost"),
    ),
    Page(
        "deadline", "errors", "The time was up",
        "The caller's timeout, or the server's own for a plugin, a foreign path or a process that SIGKILL does not end.",
        "Look at what was waited for: `pyrunc-cri debug stacks`, storage that does not answer (processes in state D), a CNI plugin.",
        "the node's owner", "DEADLINE_EXCEEDED", (_E + "DeadlineExceeded",), ("DeadlineExceeded",),
        patterns=(r"deadline exceeded", r"did not answer in"),
    ),
    Page(
        "internal", "errors", "Nothing of the kind was expected",
        "An error without a class of its own, or a bug: then the log has its traceback.",
        "Report it with the log's lines and `pyrunc-cri doctor --json`.",
        "the maintainers", "INTERNAL",
        (_E + "Error", "pyrunc.launch.run.EndedEarly", "cri_server.cli.connection.client.ServerError", "cri_server.operations.steps.InjectedError"),
    ),
    Page(
        "damaged-record", "errors", "A file of our own cannot be read",
        "It is cut off, no JSON, or of a newer version. A server that starts puts such a record aside as `*.damaged` and goes on.",
        "Look for errors of the disk in dmesg. The pod is made again by kubelet; remove the damaged file by hand.",
        "the node's owner", "INTERNAL", ("pyrunc.atomic_file.DamagedRecord",),
    ),
    Page(
        "registry-unavailable", "errors", "No host of the registry answered usefully",
        "Each mirror of hosts.toml and the registry itself were tried: refused, cut off, overloaded, or the name does not resolve. kubelet backs off and tries again.",
        "From the node: `curl -v https://HOST/v2/`; proxies are those of the server's environment; mirrors and certificates are in [registry] config_path.",
        "the peer's owner", "UNKNOWN", ("cri_server.images.client.Unavailable",), ("RegistryUnavailable",),
    ),
    Page(
        "signature-validation-failed", "errors", "The policy of this node does not let the image in",
        "The message names the policy's file and scope: it rejects the image, or the image lacks the signature that it requires, is signed with another key, or is signed for another name.",
        "Sign the image (`cosign sign --key`), or change the policy: [registry] signature_policy.",
        "the caller", "UNKNOWN", ("cri_server.images.signatures.SignatureValidationFailed",), ("SignatureValidationFailed",),
    ),
    Page(
        "unauthorized", "errors", "The registry wants a login, or another one",
        "No credentials were given, or they do not hold for this repository. They are sent only to the host that they are for.",
        "Check the pod's imagePullSecrets, or what `pyrunc-cri image pull` was given.",
        "the caller", "UNKNOWN", ("cri_server.images.registry.Unauthorized",),
        patterns=(r"[Uu]nauthorized", r"no basic auth credentials", r"authentication required", r"\b401\b"),
    ),
    Page(
        "forbidden-redirect", "errors", "A server sent us where we do not go",
        "A redirect from https to http, to another scheme, or one too many.",
        "Name the final host in hosts.toml, or mend the registry.",
        "the peer's owner", "UNKNOWN", ("cri_server.images.client.Forbidden",),
    ),
    Page(
        "no-such-image", "errors", "This registry does not have it",
        "The registry answered that there is no such repository, tag or blob.",
        "Check the reference; short names such as `nginx` mean docker.io/library/nginx.",
        "the caller", "NOT_FOUND", ("cri_server.images.registry._NoSuch",),
        patterns=(r"manifest unknown", r"name unknown", r"repository .*does not exist", r"(pull|image).*: not found"),
    ),
    Page(
        "digest-mismatch", "errors", "Content is not what its digest or size promised",
        "A proxy, a registry or a disk changed bytes on the way. Nothing of it was kept.",
        "Pull again; if it stays, the registry's storage or a proxy is broken. For a blob on our own disk: remove the image and pull it.",
        "the peer's owner", "UNKNOWN", ("cri_server.images.content.DigestMismatch",),
    ),
    Page(
        "bad-manifest", "errors", "An image's manifest, index or configuration is wrong",
        "It is no JSON, of an unknown kind, too large, nested too deep, or contradicts itself.",
        "Build and push the image again, with another tool if need be.",
        "the peer's owner", "UNKNOWN", ("cri_server.images.manifest.BadManifest",),
    ),
    Page(
        "artifact", "errors", "An OCI artifact is not an image",
        "What the reference names is a chart, a signature, an attestation, a model or another artifact: nothing in its manifest is a file system that could run or be mounted. The text has its type.",
        "Name the image; files that are to be mounted as an image volume go into an image (`FROM scratch`, `COPY`). A tag `sha256-DIGEST.sig` or `.att` belongs to another image.",
        "the caller", "UNIMPLEMENTED", ("cri_server.images.manifest.Artifact",),
    ),
    Page(
        "bad-layer", "errors", "A layer of an image cannot be unpacked",
        "No tar, cut off, of an unknown compression, larger than permitted, or with names that lead out of it.",
        "Build the image again; an image that does this on purpose is an attack.",
        "the peer's owner", "UNKNOWN", ("cri_server.images.inflate.BadLayer",),
    ),
    Page(
        "not-unpacked", "errors", "A layer of an image is not unpacked",
        "Its content is here, but a folder below layers/ or an index is gone, or this kernel cannot mount it. A server that starts makes it again.",
        "Restart the server, or pull the image again. Nothing but the server writes below its root.",
        "the node's owner", "NOT_FOUND", ("cri_server.images.catalog.NotUnpacked",),
    ),
    Page(
        "hook-failed", "errors", "A hook of the container ended with an error",
        "A program of config.json's `hooks`, or of a CDI file, which may be a GPU's driver. The text has its number and what it wrote.",
        "Run the program by hand with the container's state on stdin.",
        "the peer's owner", "UNKNOWN", ("pyrunc.launch.run.HookFailed",),
    ),
    Page(
        "systemd-refused", "errors", "systemd answered with an error",
        "Making or changing the scope of a container failed: the slice does not exist, a property is unknown to this version, or its limit is reached.",
        "`systemctl status SLICE`, `journalctl -b _PID=1`.",
        "the node's owner", "UNKNOWN", ("pyrunc.kernel.systemd.Refused",),
    ),
)  # fmt: skip

REASONS = (
    Page(
        "OOMKilled", "reasons", "The container was killed for its memory",
        "It wanted more than its limit, and the kernel killed a process of it. The exit code is 137 if that was the main process; "
        "otherwise it is what the main process ended with, which may be 0.",
        "Raise resources.limits.memory, or make the program use less; `pyrunc-cri stats` shows its use.",
    ),
    Page(
        "StartError", "reasons", "The container's process could not be executed",
        "Exit code 128. The message has the step that failed: a program that is not there, a path that cannot be mounted, a limit that is refused.",
        "`pyrunc-cri inspect ID` shows the message; an executable must be in the image, for its architecture, with its interpreter.",
    ),
    Page(
        "Unknown", "reasons", "Nobody saw how the container ended",
        "Exit code 255: its shim died, or the machine was restarted while it ran.",
        "Look for the out-of-memory killer or a restart in the journal; kubelet starts it again by its policy.",
    ),
    Page(
        "Error", "reasons", "The container ended with an exit code other than 0",
        "From 129 on it was killed by signal code - 128: 137 is SIGKILL, 139 SIGSEGV, 143 SIGTERM.",
        "`pyrunc-cri logs CONTAINER`.",
    ),
    Page(
        "Completed", "reasons", "The container ended with exit code 0",
        "Its program is done.", "Nothing, unless it was meant to run on: then look at its command and its log.",
    ),
)  # fmt: skip

ERRNOS = (
    Page("EACCES", "errno", "Permission denied", "A mode, an owner or a security module forbids it; for an executable also: no x bit, or a mount with noexec.", "`ls -lZ`, and `dmesg | grep -i -e apparmor -e avc`.", patterns=(r"(?i)Permission denied",)),
    Page("EBUSY", "errno", "In use", "Something is mounted there, a group has processes, a file is a running program.", "`findmnt`, `fuser -vm PATH`, `cat …/cgroup.procs`.", patterns=(r"(?i)Device or resource busy",)),
    Page("EEXIST", "errno", "It is there already", "Something else made the name first.", "Remove it if nothing uses it: `pyrunc-cri gc --dry-run`, `pyrunc-cri doctor`.", patterns=(r"(?i)File exists",)),
    Page("EINVAL", "errno", "An argument is refused", "The kernel does not know the option, or not in this combination; it often says more in dmesg.", "`dmesg | tail`; `pyrunc-cri doctor` finds features that are missing.", patterns=(r"(?i)Invalid argument",)),
    Page("EMFILE", "errno", "Too many open files", "A process is at its limit of descriptors; with inotify: the user is at fs.inotify.max_user_instances.", "LimitNOFILE= in the unit; `sysctl -w fs.inotify.max_user_instances=8192`.", also=("ENFILE",), patterns=(r"(?i)Too many open files",)),
    Page("ENODEV", "errno", "No such device or file system", "The kernel has no driver of this kind: for a mount the file system is not built in or its module is not loaded.", "`cat /proc/filesystems`, `modprobe NAME`.", patterns=(r"(?i)No such device",)),
    Page("ENOENT", "errno", "It is not there", "A part of the path is missing; for an executable its interpreter (#! line, or ld.so of a program for another C library) counts as well.", "Look inside: `pyrunc-cri exec ID ls -l PATH`; `file PROGRAM`.", patterns=(r"(?i)No such file or directory",)),
    Page("ENOMEM", "errno", "No memory", "The machine's, or a group's limit, is reached while something is set up; for a group also a limit below what is in use.", "`free -m`, `cat …/memory.max`.", patterns=(r"(?i)Cannot allocate memory",)),
    Page("ENOSPC", "errno", "No space left", "Blocks or inodes of the file system are used up; with inotify: fs.inotify.max_user_watches; in a group: no more groups below it.", "`df -h PATH; df -i PATH`, then `pyrunc-cri gc`.", also=("EDQUOT",), patterns=(r"(?i)No space left on device",)),
    Page("ENOSYS", "errno", "No such system call", "The kernel is too old, or a seccomp filter around the program refuses it.", "`pyrunc-cri doctor` (kernel-calls).", patterns=(r"(?i)Function not implemented",)),
    Page("ENOEXEC", "errno", "Not a program of this machine", "An executable for another architecture, or a script without its #! line.", "Pull the image for this platform: `uname -m`, `file PROGRAM`.", also=("ELIBBAD",), patterns=(r"(?i)Exec format error",)),
    Page("EPERM", "errno", "Not permitted", "A capability is missing, a user namespace does not own the thing, or a security module or filter refuses it.", "Is the server root outside of any container? securityContext.capabilities and seccompProfile for what a pod does.", patterns=(r"(?i)Operation not permitted",)),
    Page("EROFS", "errno", "Read-only", "The file system is mounted read-only; a disk with errors remounts itself so.", "`findmnt -T PATH`, `dmesg | grep -i remount`.", patterns=(r"(?i)Read-only file system",)),
    Page("ESTALE", "errno", "A network file system lost it", "The file's server was restarted or changed.", "Mount the volume again.", patterns=(r"(?i)Stale file handle",)),
)  # fmt: skip
