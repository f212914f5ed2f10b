"""The server's network: attaches pods by a chain of CNI plugins and remembers enough to detach them.

    network = Network(conf_dir, bin_dir, state_dir, errands)
    (await network.status()).ready
    result = await network.attach(PodNetwork(...))   # result.ips[0] is the pod's primary address
    await network.detach(sandbox_id, netns_path)      # idempotent, also when the namespace is gone
    await network.reconcile(live_sandbox_ids)         # at start and every ten seconds or so
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cri_server.network.model import Errands, NetworkResult, PodNetwork, Readiness
from pyrunc.errors import Unsupported


class Network:
    """One network for the node's pods: the first valid configuration of a folder, or the embedded one.

    conf_dir: folder of *.conflist, *.conf, *.json; bin_dir: folders of CNI executables separated by `:`, which win over
    our plugins of the same name; state_dir: where attachments are remembered (created, 0700).
    default: a conflist object used while `conf_dir` holds no valid configuration; None: the network is not ready then.
    """

    def __init__(
        self,
        conf_dir: str,
        bin_dir: str,
        state_dir: str,
        errands: Errands,
        *,
        default: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._conf_dir, self._bin_dir, self._state_dir = conf_dir, bin_dir, state_dir
        self._errands, self._default, self._timeout_s = errands, default, timeout_s

    async def status(self) -> Readiness:
        """The condition `NetworkReady`; cheap, asks the plugins' STATUS at most every ten seconds."""
        raise Unsupported("the network is not built yet")

    async def attach(self, pod: PodNetwork) -> NetworkResult:
        """Loopback up and the chain's ADD. What failed is rolled back by DEL before the error is raised.

        Raises WrongState (no configuration), InvalidArgument (ports, names), PeerError (a plugin failed or answered
        nonsense), ResourceExhausted (no address left), DeadlineExceeded.
        """
        raise Unsupported("the network is not built yet")

    async def detach(self, sandbox_id: str, netns_path: str | None = None) -> None:
        """The chain's DEL with the configuration of the ADD; nothing to do for an unknown or detached sandbox.

        Pass `netns_path` while the namespace still exists, None when it is gone. Call it before the namespace is closed;
        the interfaces are quiet afterwards and vanish with the namespace. Raises PeerError, DeadlineExceeded: the
        attachment is then still remembered, call again.
        """
        raise Unsupported("the network is not built yet")

    async def recall(self, sandbox_id: str) -> NetworkResult | None:
        """The result of a successful `attach` that was not detached, also after a restart of the server."""
        raise Unsupported("the network is not built yet")

    async def reconcile(self, live_sandbox_ids: Iterable[str]) -> list[str]:
        """Detach what is remembered but not live, let plugins collect leftovers, put back lost host rules.

        Returns one line per problem that stays; never raises for a broken plugin.
        """
        raise Unsupported("the network is not built yet")
