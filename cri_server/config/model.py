"""The configuration's tables: each key with its type, its default and what it is for.

The installed file, docs/configure.md and pyrunc-config(5) are made from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cri_server.store.paths import DEFAULT_STATE
from pyrunc.abi.capability import DEFAULT_CAPABILITIES

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 2)]
Mode = Annotated[str, msgspec.Meta(pattern="^0?[0-7]{3}$")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


def explained(text: str, *, reloads: bool = True) -> msgspec.Meta:
    """What a key is for; `cri_server.install.config_file` writes it above the key in the file that
    is installed.

    `reloads`: whether a running server takes a new value (SIGHUP).
    """
    return msgspec.Meta(description=text, extra={"reloads": reloads})


class Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A TOML table: keys that are not fields are errors. The docstring's first line heads the table
    in the installed file."""


class Server(Table):
    """Where the server listens and keeps things."""

    listen: Annotated[
        str,
        explained("The socket that kubelet and clients connect to: unix:///PATH.", reloads=False),
    ] = "unix:///run/pyrunc/cri.sock"
    socket_uid: Annotated[Id, explained("The user who owns that socket.", reloads=False)] = 0
    socket_gid: Annotated[
        Id,
        explained("The group that owns it: who can connect can become root.", reloads=False),
    ] = 0
    socket_mode: Annotated[
        Mode, explained("Its permission bits, in octal digits.", reloads=False)
    ] = "0660"
    root: Annotated[
        str,
        explained(
            "Images, writable layers and records: a folder on a disk. Records are synced before a call is answered.",
            reloads=False,
        ),
    ] = "/var/lib/pyrunc"
    state: Annotated[
        str,
        explained(
            "Sockets and facts of this boot: a folder on a tmpfs. It belongs to `root`: while pods of this boot live, another "
            "pair is refused.",
            reloads=False,
        ),
    ] = DEFAULT_STATE
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        explained("What is less important is not logged."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json", "journald"],
        explained("Lines of text or JSON objects on stderr, or fields of the journal."),
    ] = "text"
    log_limit_per_s: Annotated[
        NonNegative,
        explained(
            "So many log records of one kind per second, four times as many at once; 0: no limit."
        ),
    ] = 50.0
    shutdown_timeout_s: Annotated[
        PositiveSeconds,
        explained("How long a server that is stopped waits for calls that it is answering."),
    ] = 5.0


class Network(Table):
    """Where CNI finds its configuration and plugins."""

    conf_dir: Annotated[
        str,
        explained(
            "The first .conflist, .conf or .json file of it, by name, is the network of pods, or the reason why there is none."
        ),
    ] = "/etc/cni/net.d"
    bin_dir: Annotated[
        str,
        explained(
            "Folders of CNI plugins' executables, separated by `:`. bridge, host-local, loopback and portmap are built in where none is there."
        ),
    ] = "/opt/cni/bin"
    netns_dir: Annotated[
        str,
        explained(
            "Where a pod's network namespace has the name that plugins get as CNI_NETNS, a bind mount. Add-ons that mount the folder "
            "(Cilium, Istio, multus, Antrea) expect this one, in this spelling.",
            reloads=False,
        ),
    ] = "/var/run/netns"
    builtin: Annotated[
        list[str],
        explained(
            'Subnets of the network that pods get while `conf_dir` holds no configuration, such as ["10.85.0.0/16", '
            '"fd85::/64"]. Empty: none, and the node is not ready until there is a configuration.'
        ),
    ] = msgspec.field(default_factory=list)
    builtin_bridge: Annotated[str, explained("The bridge of that network.")] = "pyrunc0"


class Cgroup(Table):
    """How containers are grouped."""

    driver: Annotated[
        Literal["auto", "systemd", "cgroupfs"],
        explained(
            "Who makes cgroups; kubelet's `cgroupDriver` must agree. auto: systemd where it runs.",
            reloads=False,
        ),
    ] = "auto"
    missing_controllers: Annotated[
        Literal["error", "warn"],
        explained(
            "What a limit leads to whose controller is not in the cgroup v2 tree (hybrid hosts)."
        ),
    ] = "error"
    default_parent: Annotated[
        str,
        explained(
            "The cgroup of pods whose caller names none. Empty: /pyrunc or system.slice, by driver."
        ),
    ] = ""


class Registry(Table):
    """Where images are pulled from."""

    config_path: Annotated[
        str,
        explained(
            "Folders of HOST/hosts.toml files, as containerd's certs.d, separated by `:`; of two that have a host the first counts. Empty: none."
        ),
    ] = ""
    signature_policy: Annotated[
        str,
        explained(
            "Which images may be pulled: a file of containers-policy.json(5) with the requirements insecureAcceptAnything, reject "
            "and sigstoreSigned. Empty: all."
        ),
    ] = ""
    no_progress_timeout_s: Annotated[
        PositiveSeconds,
        explained(
            "A pull or a push that makes no progress for so long fails. Of a pull less than 1 KiB/s on average is no progress."
        ),
    ] = 300.0


class Images(Table):
    """What is kept of images."""

    store: Annotated[
        Literal["auto", "unpacked", "erofs"],
        explained(
            "erofs: layers are kept as tars and mounted (Linux 6.12, CONFIG_EROFS_FS_BACKED_BY_FILE). unpacked: every file is written. "
            "auto: erofs where it works and an image's containers share its page cache (Linux 6.15). Images that are here stay as they are until `pyrunc-cri gc` converts those that are not used.",
            reloads=False,
        ),
    ] = "auto"
    keep_blobs: Annotated[
        bool,
        explained(
            "Compressed layers are kept beside their tars: for skopeo, which reads them, and to push the same bytes again.",
            reloads=False,
        ),
    ] = False
    pinned: Annotated[
        list[str],
        explained("References of images that kubelet's garbage collection must leave alone."),
    ] = []


class Streaming(Table):
    """Where exec, attach and port-forward sessions connect. Only kubelet needs to reach it."""

    host: Annotated[str, explained("The address to listen at.", reloads=False)] = "127.0.0.1"
    port: Annotated[Port, explained("Its port; 0 takes a free one.", reloads=False)] = 0
    tls_certificate: Annotated[
        str,
        explained(
            "A PEM file with the server's certificate and its chain; sessions use TLS then. It must name `host` and be one that "
            "kubelet's machine trusts. Files that change are read again.",
            reloads=False,
        ),
    ] = ""
    tls_key: Annotated[
        str, explained("A PEM file with the certificate's key, without a password.", reloads=False)
    ] = ""
    tls_client_ca: Annotated[
        str,
        explained(
            "A PEM file with authorities: clients must show a certificate of one of them. Empty: they need none.",
            reloads=False,
        ),
    ] = ""


class Pods(Table):
    """What holds for each pod."""

    unprivileged_ports: Annotated[
        bool,
        explained(
            "Programs without CAP_NET_BIND_SERVICE may listen at ports below 1024 of their pod's network "
            "(net.ipv4.ip_unprivileged_port_start=0)."
        ),
    ] = False
    unprivileged_ping: Annotated[
        bool,
        explained(
            "Programs without CAP_NET_RAW may ping from their pod's network (net.ipv4.ping_group_range); not in pods with a "
            "user namespace."
        ),
    ] = False


class Shims(Table):
    """The processes that start and supervise containers and read their output."""

    count: Annotated[
        int,
        msgspec.Meta(ge=0, le=8),
        explained("How many such processes serve all pods. 0: as many as processors, at most 8."),
    ] = 0


class Shim(Table):
    """Kept for configurations of earlier versions."""

    pods_per_shim: Annotated[
        int,
        msgspec.Meta(ge=1, le=100),
        explained("Has no effect any more: see `[shims] count`."),
    ] = 1


class Containers(Table):
    """What holds for each container."""

    restrict_oom_score_adj: Annotated[
        Literal["auto", "always", "never"],
        explained(
            "Raise an OOM score below the server's own instead of failing, for servers that may not lower scores. auto finds out."
        ),
    ] = "auto"
    volatile: Annotated[
        bool,
        explained(
            "Writable layers are not synced: faster, and a container does not outlive a power cut anyway."
        ),
    ] = True
    rlimits: Annotated[
        list[str],
        explained(
            'Resource limits of processes, each NAME=SOFT[:HARD] with a number or `unlimited`, such as ["nofile=65536:524288"]. '
            "Those not named have the server's defaults."
        ),
    ] = []
    default_capabilities: Annotated[
        list[str],
        explained(
            "What a container may do that is not privileged and asks for nothing else; pods add to it and drop from it. Names "
            "as in capabilities(7)."
        ),
    ] = msgspec.field(default_factory=lambda: sorted(DEFAULT_CAPABILITIES))
    seccomp_profile: Annotated[
        str,
        explained(
            "A file with the OCI seccomp object that RuntimeDefault means. Empty: the profile that is built in."
        ),
    ] = ""
    hooks_dirs: Annotated[
        list[str],
        explained(
            "Folders of hooks for containers, JSON files as in oci-hooks(5), such as /usr/share/containers/oci/hooks.d. The "
            "last folder wins."
        ),
    ] = []
    device_ownership: Annotated[
        bool,
        explained(
            "Devices of a container belong to its `runAsUser` and `runAsGroup`, where those are not 0, instead of the owner of "
            "the host's device."
        ),
    ] = False
    pod_annotations: Annotated[
        list[str],
        explained(
            'Annotations of pods that go to the OCI spec of their containers, `*` for any characters, such as ["io.example/*"].'
        ),
    ] = []
    container_annotations: Annotated[
        list[str],
        explained(
            "The same for annotations of containers, as kubelet and device plugins set them."
        ),
    ] = []
    cgroup_writable: Annotated[
        bool,
        explained(
            "Containers that are not privileged may write to their cgroup, too: systemd in a container makes groups below it. Its "
            "own limits stay out of reach."
        ),
    ] = False
    privileged_without_host_devices: Annotated[
        bool,
        explained("Privileged containers get the host's devices only where they ask for them."),
    ] = False
    restore_images: Annotated[
        bool,
        explained(
            "Images that hold a checkpoint are restored. What CRIU reads decides what processes may do and what is mounted for them, "
            "so a user who may name an image in a pod can then be root of the node. Archives on the node, named by their path, are restored "
            "in any case."
        ),
    ] = False
    block_io_classes: Annotated[
        str,
        explained(
            "A YAML file of classes of block I/O (goresctrl's), which pods name in the annotation "
            "blockio.resources.beta.kubernetes.io/pod. Empty: there are none."
        ),
    ] = ""
    rdt_classes: Annotated[
        str,
        explained(
            "A YAML file of classes of caches and memory bandwidth (Intel RDT and its like), which pods name in the annotation "
            "rdt.resources.beta.kubernetes.io/pod. Empty: classes are the groups that resctrl has."
        ),
    ] = ""
    cdi_dirs: Annotated[
        list[str],
        explained("Where device drivers describe their devices (CDI). The last folder wins."),
    ] = msgspec.field(default_factory=lambda: ["/etc/cdi", "/run/cdi"])
    foreign_path_timeout_s: Annotated[
        PositiveSeconds,
        explained(
            "How long a path of the host may take to answer, such as a volume on a network file system."
        ),
    ] = 30.0


class Metrics(Table):
    """Metrics for Prometheus, the server's and the pods', and the server's health (`/healthz`)."""

    address: Annotated[
        str,
        explained(
            "Where they are served: unix:///PATH, or HOST:PORT such as 127.0.0.1:9477, without a password for clients that can "
            "connect. Empty: not at all.",
            reloads=False,
        ),
    ] = ""


class Timeline(Table):
    """What is remembered of each call (`pyrunc-cri timeline`)."""

    operations: Annotated[
        bool,
        explained(
            "Also each operation of the launcher that sets up a process, as `pyrunc plan` numbers them. Creates and starts take up to "
            "twice as long."
        ),
    ] = False


class Tracing(Table):
    """The calls and their parts as OpenTelemetry's spans."""

    endpoint: Annotated[
        str,
        explained(
            "The collector, by OTLP over HTTP: http://HOST:4318 or a whole URL; more by OpenTelemetry's own variables, such as "
            "OTEL_EXPORTER_OTLP_HEADERS. Empty: none. Without the Debian package: pip install 'pyrunc[tracing]'.",
            reloads=False,
        ),
    ] = ""
    sampling: Annotated[
        float,
        msgspec.Meta(ge=0, le=1),
        explained(
            "The share of calls that are sent. A client that sends a `traceparent`, as kubelet can, decides that for its own calls.",
            reloads=False,
        ),
    ] = 1.0


class Nri(Table):
    """Plugins of the Node Resource Interface, which adjust containers before they run."""

    enabled: Annotated[
        bool, explained("Whether plugins are started and may connect.", reloads=False)
    ] = False
    socket: Annotated[
        str, explained("Where plugins connect that the server has not started.", reloads=False)
    ] = "/var/run/nri/nri.sock"
    plugin_dir: Annotated[
        str,
        explained(
            "Plugins to start with the server: programs called INDEX-NAME, such as 10-devices.",
            reloads=False,
        ),
    ] = "/opt/nri/plugins"
    plugin_config_dir: Annotated[
        str,
        explained(
            "What those plugins are configured with: the text of INDEX-NAME.conf, else of NAME.conf.",
            reloads=False,
        ),
    ] = "/etc/nri/conf.d"
    registration_timeout_s: Annotated[
        PositiveSeconds,
        explained(
            "How long registration, configuration and synchronization of a plugin may take, each.",
            reloads=False,
        ),
    ] = 5.0
    request_timeout_s: Annotated[
        PositiveSeconds,
        explained(
            "A plugin that has not answered a request by then is dropped, and the request goes on without it.",
            reloads=False,
        ),
    ] = 2.0
    disable_external: Annotated[
        bool, explained("Only plugins of `plugin_dir`: no socket.", reloads=False)
    ] = False
    required_plugins: Annotated[
        list[str],
        explained(
            "Names of plugins, with or without their index, without which no container is created."
        ),
    ] = []


class Selinux(Table):
    """Labels of pods on a node whose kernel runs SELinux."""

    enabled: Annotated[
        bool,
        explained(
            "Label processes, mounts and volumes as pods ask, and keep pods apart by categories. Without SELinux in the kernel nothing "
            "is labelled either way.",
            reloads=False,
        ),
    ] = True
    category_range: Annotated[
        int,
        msgspec.Meta(ge=2, le=1024),
        explained(
            "How many categories (c0, c1 and so on) a pod's two are chosen from; a policy has 1024.",
            reloads=False,
        ),
    ] = 1024


class Runtime(Table):
    """A runtime handler, which a RuntimeClass names. Its keys override those of [containers]."""

    binary: Annotated[
        str,
        explained(
            "An OCI runtime that runs the containers, such as /usr/sbin/runc: create, start, exec, kill, delete as of runc's command "
            "line. Empty: our own, without a command line."
        ),
    ] = ""
    arguments: Annotated[list[str], explained("What it is given before the command.")] = []
    cgroup_writable: Annotated[bool | None, explained("As in [containers].")] = None
    privileged_without_host_devices: Annotated[bool | None, explained("As in [containers].")] = None
    default_capabilities: Annotated[list[str] | None, explained("As in [containers].")] = None
    seccomp_profile: Annotated[str | None, explained("As in [containers].")] = None
    hooks_dirs: Annotated[list[str] | None, explained("As in [containers].")] = None
    device_ownership: Annotated[bool | None, explained("As in [containers].")] = None
    pod_annotations: Annotated[list[str] | None, explained("As in [containers].")] = None
    container_annotations: Annotated[list[str] | None, explained("As in [containers].")] = None


class Config(Table):
    """The whole file."""

    server: Server = msgspec.field(default_factory=Server)
    network: Network = msgspec.field(default_factory=Network)
    cgroup: Cgroup = msgspec.field(default_factory=Cgroup)
    registry: Registry = msgspec.field(default_factory=Registry)
    images: Images = msgspec.field(default_factory=Images)
    streaming: Streaming = msgspec.field(default_factory=Streaming)
    pods: Pods = msgspec.field(default_factory=Pods)
    shims: Shims = msgspec.field(default_factory=Shims)
    shim: Shim = msgspec.field(default_factory=Shim)
    containers: Containers = msgspec.field(default_factory=Containers)
    runtimes: dict[str, Runtime] = msgspec.field(default_factory=dict)
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    timeline: Timeline = msgspec.field(default_factory=Timeline)
    tracing: Tracing = msgspec.field(default_factory=Tracing)
    nri: Nri = msgspec.field(default_factory=Nri)
    selinux: Selinux = msgspec.field(default_factory=Selinux)

    @property
    def socket_path(self) -> Path:
        """The path behind `server.listen`."""
        return Path(self.server.listen.removeprefix("unix://"))

    @property
    def root(self) -> Path:
        return Path(self.server.root)

    @property
    def state(self) -> Path:
        return Path(self.server.state)
