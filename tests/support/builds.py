"""What the collected tests need that takes minutes to build, made before the first of them runs.

So no test's time limit counts a build, and a run says what it waits for. What is in the cache already costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

TESTS = Path(__file__).parents[1]


def _kubernetes() -> object:
    from tests.support import toolchain

    return toolchain.kubernetes()


def _kube_proxy() -> object:
    from tests.support import toolchain

    return toolchain.kube_proxy()


def _flannel() -> object:
    from tests.support import flannel

    return flannel.programs()


def _peer() -> object:
    from tests.support import toolchain

    return toolchain.peer()


def _reference_plugins() -> object:
    from tests.support import toolchain

    return toolchain.reference_plugins()


def _runtime_tools() -> object:
    from tests.system import runtime_tools

    return runtime_tools.build()


def _guest() -> object:
    from tests.support import guest, guest_disk

    return guest.build(), guest_disk.kubernetes()


# Which tests, as the beginning of their path below tests/, need what.
NEEDS: tuple[tuple[str, str, Callable[[], object]], ...] = (
    ("kube/", "Kubernetes and etcd", _kubernetes),
    ("kube_nodes/", "Kubernetes and etcd", _kubernetes),
    ("kube_nodes/", "kube-proxy", _kube_proxy),
    ("kube_nodes/", "flannel", _flannel),
    ("kernel/cni/", "the reference CNI plugins", _reference_plugins),
    ("cri/network/test_under_containerd", "containerd and runc", _peer),
    ("system/test_runtime_tools", "the OCI validation programs", _runtime_tools),
    ("vm/test_oci", "containerd and runc", _peer),
    ("vm/", "the guest's disk, Kubernetes for it", _guest),
)


def make_for(paths: Iterable[Path], say: Callable[[str], None]) -> None:
    """Build what the test files `paths` need, each once; `say` hears of what took time."""
    wanted = {str(path.relative_to(TESTS)) for path in paths if path.is_relative_to(TESTS)}
    builds = {name: build for start, name, build in NEEDS if any(path.startswith(start) for path in wanted)}
    for name, build in builds.items():
        began = time.monotonic()
        build()
        if (took_s := time.monotonic() - began) > 5:
            say(f"built in {took_s:.0f} s: {name}")
