"""The tables of the configuration: each key with its type, default and explanation.

The installed file, docs/configure.md and pyrunc-config(5) are generated from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cri_server.store.paths import DEFAULT_STATE
from pyrunc.abi.capability import DEFAULT_CAPABILITIES

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
# 2^32 - 1 is (uid_t) -1, which chown(2) takes for "leave unchanged".
Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 2)]
Mode = Annotated[str, msgspec.Meta(pattern="^0?[0-7]{3}$")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


def explained(text: str) -> msgspec.Meta:
    """Return the metadata of a key that can change while the server runs: SIGHUP applies a new
    value. The installed configuration file prints `text` above the key."""
    return msgspec.Meta(description=text, extra={"reloads": True})


def at_restart(text: str) -> msgspec.Meta:
    """Return the metadata of a key whose new value needs a restart of the server. The installed
    configuration file prints `text` above the key."""
    return msgspec.Meta(description=text, extra={"reloads": False})


class ConfigTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A TOML table; unknown keys are errors. The first line of a subclass's docstring is the
    heading of its table in the installed file."""


class ServerConfig(ConfigTable):
    """Where the server listens and stores its files."""

    listen: Annotated[
        str,
        at_restart("The socket for kubelet and clients: unix:///PATH."),
    ] = "unix:///run/pyrunc/cri.sock"
    socket_uid: Annotated[Id, at_restart("The user who owns the socket.")] = 0
    socket_gid: Annotated[
        Id,
        at_restart("The group that owns the socket. A user who can connect can become root."),
    ] = 0
    socket_mode: Annotated[
        Mode, at_restart("The permission bits of the socket, in octal digits.")
    ] = "0660"
    root: Annotated[
        str,
        at_restart(
            "A folder on a disk for images, writable layers and records. Records are synced "
            "before a call is answered."
        ),
    ] = "/var/lib/pyrunc"
    state: Annotated[
        str,
        at_restart(
            "A folder on a tmpfs for sockets and files that are valid until the next boot. While "
            "pods of this boot exist, the server refuses another `state` for the same `root`."
        ),
    ] = DEFAULT_STATE
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        explained("The lowest level that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json", "journald"],
        explained("text and json write lines to stderr, journald writes fields to the journal."),
    ] = "text"
    log_limit_per_s: Annotated[
        NonNegative,
        explained(
            "The server writes at most this many log records of one kind per second, and up to "
            "four times as many in a burst. 0: no limit."
        ),
    ] = 50.0
    shutdown_timeout_s: Annotated[
        PositiveSeconds,
        explained("How long a stopping server waits for calls in progress."),
    ] = 5.0


class NetworkConfig(ConfigTable):
    """Where CNI configuration and plugins are."""

    conf_dir: Annotated[
        str,
        explained(
            "The first .conflist, .conf or .json file in this folder, by name, is the network of "
            "pods. If this file has errors, there is no network."
        ),
    ] = "/etc/cni/net.d"
    bin_dir: Annotated[
        str,
        explained(
            "Folders with executables of CNI plugins, separated by `:`. bridge, host-local, "
            "loopback and portmap are built in; an executable of the same name in a folder is used "
            "instead of the built-in plugin."
        ),
    ] = "/opt/cni/bin"
    netns_dir: Annotated[
        str,
        at_restart(
            "The folder in which the network namespace of each pod is bind-mounted on a file. "
            "Plugins get the path of this file as CNI_NETNS. Add-ons that mount the folder "
            "(Cilium, Istio, multus, Antrea) expect the default, in this spelling."
        ),
    ] = "/var/run/netns"
    builtin: Annotated[
        list[str],
        explained(
            "Subnets of the network that pods get while `conf_dir` has no configuration, such as "
            '["10.85.0.0/16", "fd85::/64"]. Empty: the node is not ready until there is a '
            "configuration."
        ),
    ] = msgspec.field(default_factory=list)
    builtin_bridge: Annotated[str, explained("The bridge of the built-in network.")] = "pyrunc0"


class CgroupConfig(ConfigTable):
    """The cgroups of pods and containers."""

    driver: Annotated[
        Literal["auto", "systemd", "cgroupfs"],
        at_restart(
            "How cgroups are created. kubelet's `cgroupDriver` must be the same. auto: systemd "
            "where it runs."
        ),
    ] = "auto"
    missing_controllers: Annotated[
        Literal["error", "warn"],
        explained(
            "What happens to a limit whose controller is not in the cgroup v2 tree (hybrid "
            "hosts): an error, or a warning and no limit."
        ),
    ] = "error"
    default_parent: Annotated[
        str,
        explained(
            "The parent cgroup of pods whose request names none. Empty: /pyrunc with cgroupfs, "
            "system.slice with systemd."
        ),
    ] = ""


class RegistryConfig(ConfigTable):
    """Where images are pulled from."""

    config_path: Annotated[
        str,
        explained(
            "Folders with HOST/hosts.toml files, laid out as containerd's certs.d, separated by "
            "`:`. The first one that has a folder for the host is used. Empty: none."
        ),
    ] = ""
    signature_policy: Annotated[
        str,
        explained(
            "A file that decides which images may be pulled, in the format of "
            "containers-policy.json(5). It may use the requirements insecureAcceptAnything, reject "
            "and sigstoreSigned. Empty: all images."
        ),
    ] = ""
    no_progress_timeout_s: Annotated[
        PositiveSeconds,
        explained(
            "A pull or push without progress for this time fails. For a pull, less than 1 KiB/s "
            "on average is no progress."
        ),
    ] = 300.0


class ImagesConfig(ConfigTable):
    """How images are stored."""

    store: Annotated[
        Literal["auto", "unpacked", "erofs"],
        at_restart(
            "erofs: layers are stored as tars and mounted (Linux 6.12, "
            "CONFIG_EROFS_FS_BACKED_BY_FILE). unpacked: every file is written. auto: erofs where "
            "containers of an image can share its page cache (Linux 6.15), else unpacked. "
            "Existing images keep their storage format until `pyrunc-cri gc` converts the unused "
            "ones."
        ),
    ] = "auto"
    keep_blobs: Annotated[
        bool,
        at_restart(
            "Also store the compressed layers. skopeo can then read the images on the disk, and a "
            "push sends the same bytes again."
        ),
    ] = False
    # msgspec copies an empty list for each instance, unlike a default of a Python function.
    pinned: Annotated[
        list[str],
        explained("References of images that kubelet's garbage collection must not remove."),
    ] = []


class StreamingConfig(ConfigTable):
    """The server of exec, attach and port-forward. Only kubelet needs to reach this server."""

    host: Annotated[str, at_restart("The address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, at_restart("The port. 0 selects a free one.")] = 0
    tls_certificate: Annotated[
        str,
        at_restart(
            "A PEM file with the server's certificate and its chain. If it is set, sessions use "
            "TLS. The certificate must name `host`, and kubelet's machine must trust it. Changed "
            "files are read again."
        ),
    ] = ""
    tls_key: Annotated[
        str, at_restart("A PEM file with the certificate's key, without a password.")
    ] = ""
    tls_client_ca: Annotated[
        str,
        at_restart(
            "A PEM file with authorities. Clients must present a certificate of one of them. "
            "Empty: clients need no certificate."
        ),
    ] = ""


class PodsConfig(ConfigTable):
    """Settings of every pod."""

    unprivileged_ports: Annotated[
        bool,
        explained(
            "Processes without CAP_NET_BIND_SERVICE may listen on ports below 1024 of their pod's "
            "network (net.ipv4.ip_unprivileged_port_start=0)."
        ),
    ] = False
    unprivileged_ping: Annotated[
        bool,
        explained(
            "Processes without CAP_NET_RAW may ping from their pod's network "
            "(net.ipv4.ping_group_range), except in pods with a user namespace."
        ),
    ] = False


class ShimsConfig(ConfigTable):
    """The processes that start and supervise containers and read their output."""

    count: Annotated[
        int,
        msgspec.Meta(ge=0, le=8),
        explained(
            "The number of shims, which share all pods. 0: one for each processor, at most 8."
        ),
    ] = 0


class ShimConfig(ConfigTable):
    """A table of earlier versions, which [shims] replaces."""

    pods_per_shim: Annotated[
        int,
        msgspec.Meta(ge=1, le=100),
        explained("No effect any more: see `[shims] count`."),
    ] = 1


class ContainersConfig(ConfigTable):
    """Settings of every container."""

    restrict_oom_score_adj: Annotated[
        Literal["auto", "always", "never"],
        explained(
            "If a container's oom_score_adj is below the server's own, raise it to the server's "
            "own. A server without CAP_SYS_RESOURCE cannot set the lower value, so the container "
            "would not start. auto: raise it if the server lacks the capability."
        ),
    ] = "auto"
    volatile: Annotated[
        bool,
        explained(
            "Writable layers are not synced. This is faster, and a container does not outlive a "
            "power cut anyway."
        ),
    ] = True
    rlimits: Annotated[
        list[str],
        explained(
            "Resource limits of processes, each NAME=SOFT[:HARD] with a number or `unlimited`, "
            'such as ["nofile=65536:524288"]. Limits that are not listed have the defaults of a '
            "systemd service."
        ),
    ] = []
    default_capabilities: Annotated[
        list[str],
        explained(
            "Capabilities of a container that is not privileged; pods add to them and drop from "
            "them. Names are those of capabilities(7)."
        ),
    ] = msgspec.field(default_factory=lambda: sorted(DEFAULT_CAPABILITIES))
    seccomp_profile: Annotated[
        str,
        explained(
            "A file with the OCI seccomp object of the profile RuntimeDefault. Empty: the "
            "built-in profile."
        ),
    ] = ""
    hooks_dirs: Annotated[
        list[str],
        explained(
            "Folders with hooks for containers, JSON files as in oci-hooks(5), such as "
            "/usr/share/containers/oci/hooks.d. A file in a later folder replaces one of the same "
            "name in an earlier one."
        ),
    ] = []
    device_ownership: Annotated[
        bool,
        explained(
            "The devices of a container that is not privileged belong to its `runAsUser` and "
            "`runAsGroup`, if these are not 0. false: devices have the owner and group that they "
            "have on the host."
        ),
    ] = False
    pod_annotations: Annotated[
        list[str],
        explained(
            "Annotations of pods that are copied to the OCI spec of their containers, such as "
            '["io.example/*"]. `*` stands for any characters.'
        ),
    ] = []
    container_annotations: Annotated[
        list[str],
        explained(
            "Annotations of containers that are copied to their OCI spec. kubelet and device "
            "plugins set them. `*` stands for any characters."
        ),
    ] = []
    cgroup_writable: Annotated[
        bool,
        explained(
            "Containers that are not privileged may also write to their cgroup, so that systemd in "
            "a container can create cgroups below it. A container cannot change its own limits."
        ),
    ] = False
    privileged_without_host_devices: Annotated[
        bool,
        explained("Privileged containers get only the host's devices that they ask for."),
    ] = False
    restore_images: Annotated[
        bool,
        explained(
            "Restore images that hold a checkpoint. A checkpoint decides what its processes may "
            "do and what is mounted for them, so every user who may name an image in a pod can "
            "then become root of the node. Archives that are named by a path of the node are "
            "restored in any case."
        ),
    ] = False
    block_io_classes: Annotated[
        str,
        explained(
            "A YAML file in goresctrl's format with classes of block I/O. Pods name a class in the "
            "annotation blockio.resources.beta.kubernetes.io/pod. Empty: no classes."
        ),
    ] = ""
    rdt_classes: Annotated[
        str,
        explained(
            "A YAML file with classes of caches and memory bandwidth (Intel RDT and similar). Pods "
            "name a class in the annotation rdt.resources.beta.kubernetes.io/pod. Empty: the "
            "classes are the existing groups of resctrl."
        ),
    ] = ""
    cdi_dirs: Annotated[
        list[str],
        explained(
            "Folders in which device drivers describe their devices (CDI). If two folders "
            "describe one device, the folder that is later in the list counts."
        ),
    ] = msgspec.field(default_factory=lambda: ["/etc/cdi", "/run/cdi"])
    foreign_path_timeout_s: Annotated[
        PositiveSeconds,
        explained(
            "How long a path of the host, such as a volume on a network file system, may take to "
            "answer."
        ),
    ] = 30.0


class MetricsConfig(ConfigTable):
    """Metrics of the server and of pods for Prometheus, and the server's health (`/healthz`)."""

    address: Annotated[
        str,
        at_restart(
            "The address that serves metrics and health: unix:///PATH, or HOST:PORT such as "
            "127.0.0.1:9477. There is no password. Empty: none."
        ),
    ] = ""


class TimelineConfig(ConfigTable):
    """The timeline: the latest calls with the durations of their steps."""

    operations: Annotated[
        bool,
        explained(
            "Also record each operation of the launcher, as `pyrunc plan` numbers them. Creates "
            "and starts take up to twice as long."
        ),
    ] = False


class TracingConfig(ConfigTable):
    """Export of calls and their steps as OpenTelemetry spans."""

    endpoint: Annotated[
        str,
        at_restart(
            "The URL of the collector, for OTLP over HTTP: http://HOST:4318, or a URL with a path. "
            "OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_HEADERS, apply too. Empty: "
            "none. Without the Debian package, tracing needs pip install 'pyrunc[tracing]'."
        ),
    ] = ""
    sampling: Annotated[
        float,
        msgspec.Meta(ge=0, le=1),
        at_restart(
            "The share of calls whose spans are sent, 0 to 1. A client that sends a `traceparent`, "
            "as kubelet can, decides for its own calls."
        ),
    ] = 1.0


class NriConfig(ConfigTable):
    """Plugins of the Node Resource Interface, which adjust containers before they run."""

    enabled: Annotated[bool, at_restart("Start plugins, and let plugins connect.")] = False
    socket: Annotated[
        str, at_restart("The socket for plugins that the server has not started.")
    ] = "/var/run/nri/nri.sock"
    plugin_dir: Annotated[
        str,
        at_restart(
            "Plugins that start with the server: executables named INDEX-NAME, such as 10-devices."
        ),
    ] = "/opt/nri/plugins"
    plugin_config_dir: Annotated[
        str,
        at_restart(
            "The configuration of the plugins in `plugin_dir`: the text of INDEX-NAME.conf, else "
            "of NAME.conf."
        ),
    ] = "/etc/nri/conf.d"
    registration_timeout_s: Annotated[
        PositiveSeconds,
        at_restart(
            "How long each of registration, configuration and synchronization of a plugin may take."
        ),
    ] = 5.0
    request_timeout_s: Annotated[
        PositiveSeconds,
        at_restart(
            "How long a plugin may take to answer a request. A slower plugin is dropped, and the "
            "request continues without it."
        ),
    ] = 2.0
    disable_external: Annotated[
        bool, at_restart("Use only plugins of `plugin_dir`, and open no socket.")
    ] = False
    required_plugins: Annotated[
        list[str],
        explained(
            "Names of plugins, with or without their index. While one of them is missing, no "
            "container is created."
        ),
    ] = []


class SelinuxConfig(ConfigTable):
    """Labels of pods on a node whose kernel runs SELinux."""

    enabled: Annotated[
        bool,
        at_restart(
            "Label processes, mounts and volumes as pods ask, and separate pods by categories. "
            "Without SELinux in the kernel nothing is labelled."
        ),
    ] = True
    category_range: Annotated[
        int,
        msgspec.Meta(ge=2, le=1024),
        at_restart(
            "The number of categories (c0, c1 and so on) of which each pod gets two. The usual "
            "policies define 1024."
        ),
    ] = 1024


class RuntimeConfig(ConfigTable):
    """A runtime handler, which a RuntimeClass names. Its keys override those of [containers]."""

    binary: Annotated[
        str,
        explained(
            "An OCI runtime that runs the containers, such as /usr/sbin/runc. It must have the "
            "commands create, start, exec, kill and delete of runc's command line. Empty: the "
            "built-in runtime."
        ),
    ] = ""
    arguments: Annotated[list[str], explained("Arguments before the runtime's command.")] = []
    cgroup_writable: Annotated[bool | None, explained("As in [containers].")] = None
    privileged_without_host_devices: Annotated[bool | None, explained("As in [containers].")] = None
    default_capabilities: Annotated[list[str] | None, explained("As in [containers].")] = None
    seccomp_profile: Annotated[str | None, explained("As in [containers].")] = None
    hooks_dirs: Annotated[list[str] | None, explained("As in [containers].")] = None
    device_ownership: Annotated[bool | None, explained("As in [containers].")] = None
    pod_annotations: Annotated[list[str] | None, explained("As in [containers].")] = None
    container_annotations: Annotated[list[str] | None, explained("As in [containers].")] = None


class Config(ConfigTable):
    """All tables of the configuration file."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    network: NetworkConfig = msgspec.field(default_factory=NetworkConfig)
    cgroup: CgroupConfig = msgspec.field(default_factory=CgroupConfig)
    registry: RegistryConfig = msgspec.field(default_factory=RegistryConfig)
    images: ImagesConfig = msgspec.field(default_factory=ImagesConfig)
    streaming: StreamingConfig = msgspec.field(default_factory=StreamingConfig)
    pods: PodsConfig = msgspec.field(default_factory=PodsConfig)
    shims: ShimsConfig = msgspec.field(default_factory=ShimsConfig)
    shim: ShimConfig = msgspec.field(default_factory=ShimConfig)
    containers: ContainersConfig = msgspec.field(default_factory=ContainersConfig)
    runtimes: dict[str, RuntimeConfig] = msgspec.field(default_factory=dict)
    metrics: MetricsConfig = msgspec.field(default_factory=MetricsConfig)
    timeline: TimelineConfig = msgspec.field(default_factory=TimelineConfig)
    tracing: TracingConfig = msgspec.field(default_factory=TracingConfig)
    nri: NriConfig = msgspec.field(default_factory=NriConfig)
    selinux: SelinuxConfig = msgspec.field(default_factory=SelinuxConfig)

    @property
    def socket_path(self) -> Path:
        """Return the path in `server.listen`, without `unix://`."""
        return Path(self.server.listen.removeprefix("unix://"))

    @property
    def root(self) -> Path:
        return Path(self.server.root)

    @property
    def state(self) -> Path:
        return Path(self.server.state)
