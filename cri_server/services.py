"""Holds the objects that CRI calls use, created once at the server's start: configuration, facts of
the host, index of pods and containers, images, network, shims."""

from __future__ import annotations

from dataclasses import dataclass, field

from cri_server.config import Config
from cri_server.images.service import ImageService
from cri_server.network.service import NetworkService
from cri_server.node.host import NodeFacts
from cri_server.node.oci_features import OciFeatures
from cri_server.observability.events import Events
from cri_server.observability.lifecycle import LifecycleObserver
from cri_server.observability.timeline.export import Exporter
from cri_server.observability.timeline.ring import Ring
from cri_server.operations.locks import SingleFlight
from cri_server.pod.keeper import KeeperWatch
from cri_server.pod.pod import Pod
from cri_server.pod.shims import Shims
from cri_server.security.apparmor import DefaultProfile
from cri_server.security.selinux.levels import SelinuxLevels
from cri_server.store.index import StoreIndex
from cri_server.store.model import Container, Sandbox
from cri_server.store.paths import Paths
from cri_server.store.trash import Trash
from cri_server.zygote.client import Zygote


@dataclass(slots=True)
class Services:
    """The objects that CRI calls use. `running`: the operations in progress by key; a repeated call
    waits for the operation of the first call."""

    config: Config
    node: NodeFacts
    paths: Paths
    index: StoreIndex
    images: ImageService
    network: NetworkService
    shims: Shims
    zygote: Zygote
    events: Events
    keeper: KeeperWatch | None = None
    timeline: Ring = field(init=False)
    tracing: Exporter | None = None
    default_apparmor: DefaultProfile = field(default_factory=DefaultProfile)
    oci_features: OciFeatures = field(init=False)
    running: SingleFlight = field(default_factory=SingleFlight)
    selinux_levels: SelinuxLevels = field(init=False)
    trash: Trash = field(init=False)
    observer: LifecycleObserver = field(default_factory=LifecycleObserver)
    pending: set[str] = field(default_factory=set)  # ids of sandboxes that are being created

    def __post_init__(self) -> None:
        self.selinux_levels = SelinuxLevels(self.config.selinux.category_range)
        self.oci_features = OciFeatures(self.zygote)
        self.trash = Trash(self.paths.trash)
        self.timeline = Ring(self.paths.root / "timeline")

    def pod(self, sandbox: Sandbox) -> Pod:
        """Return a `Pod`, through which the server calls the shim of `sandbox`."""
        return Pod(self.shims, sandbox)

    def pod_of(self, container: Container) -> Pod | None:
        """Return a `Pod`, through which the server calls the shim of `container`; None if the
        sandbox is gone."""
        sandbox = self.index.sandboxes.find(container.sandbox_id)
        return None if sandbox is None else self.pod(sandbox)
