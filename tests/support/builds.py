"""Makes builds that take minutes before the first test that needs them.

So no test's time limit includes a build, and a test run reports which builds it waits for. A build
in the cache is not repeated.
"""

from __future__ import annotations

import fcntl
import importlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.support import toolchain

TESTS = Path(__file__).parents[1]


# Beginnings of test paths below tests/, and the functions that build what they need unless it
# exists.
NEEDS: tuple[tuple[str, str], ...] = (
    ("kube/", "tests.support.toolchain:kubernetes"),
    ("kube_e2e/", "tests.support.toolchain:kubernetes"),
    ("kube_e2e/", "tests.support.toolchain:e2e"),
    ("kube_e2e/", "tests.kube_e2e.images:archive"),
    ("kube_e2e_node/", "tests.support.toolchain:kubernetes"),
    ("kube_e2e_node/", "tests.support.toolchain:e2e_helpers"),
    ("kube_e2e_node/", "tests.support.toolchain:e2e_node"),
    ("kube_e2e_node/", "tests.kube_e2e_node.images:archives"),
    ("kube_bench/", "tests.support.toolchain:kubernetes"),
    ("kube_bench/", "tests.support.toolchain:peer"),
    ("kube_bench/", "tests.support.crio:peer"),
    ("kube_nodes/", "tests.support.toolchain:kubernetes"),
    ("kube_nodes/", "tests.support.toolchain:kube_proxy"),
    ("kube_nodes/", "tests.support.flannel:programs"),
    ("kube_conformance/", "tests.kube_conformance.images:archives"),
    ("kube_conformance/", "tests.support.toolchain:kube_proxy"),
    ("kube_conformance/", "tests.support.flannel:programs"),
    ("kube_init/", "tests.support.control_plane_images:archive"),
    ("kube_k3s/", "tests.support.k3s:programs"),
    ("kube_k3s/", "tests.support.flannel:programs"),
    ("kube_k3s/", "tests.support.toolchain:reference_plugins"),
    ("kernel/cni/", "tests.support.toolchain:reference_plugins"),
    ("cri/streaming/", "tests.support.goclient.build:goclient"),
    ("cri/nri/test_go", "tests.support.nri_go.build:both"),
    ("cri/critest/", "tests.support.toolchain:critest"),
    ("cri/test_h2spec", "tests.support.toolchain:h2spec"),
    ("cri/network/test_under_containerd", "tests.support.toolchain:peer"),
    ("cri/test_benchmarks", "tests.support.toolchain:peer"),
    ("cri/test_benchmarks", "tests.support.crio:peer"),
    ("install/test_package", "tests.support.package:build"),
    ("system/test_runtime_tools", "tests.system.runtime_tools:build"),
    ("cri/test_runtime_handlers", "tests.support.toolchain:runc"),
    ("vm/test_oci", "tests.support.toolchain:peer"),
    ("vm/", "tests.support.guest:build"),
    ("vm/test_selinux", "tests.support.guest:build_selinux"),
    ("vm/test_conformance", "tests.support.toolchain:e2e"),
    ("vm/test_conformance", "tests.support.toolchain:containerd_integration"),
    ("vm/test_conformance", "tests.kube_e2e.images:archive"),
    ("vm/test_node_suite", "tests.vm.node_suite:disk"),
    ("vm/test_peers", "tests.support.guest_disk:containerd"),
    ("vm/test_debian12", "tests.support.guest:build_bookworm"),
    ("vm/test_tasks", "tests.support.guest_disk:kubeadm"),
    ("vm/test_two_guests", "tests.support.guest_disk:flannel"),
    ("vm/test_arm64", "tests.support.guest:build_arm64"),
    ("vm/test_arm64", "tests.support.guest_disk:kubelet_arm64"),
    ("vm/", "tests.support.guest_disk:kubernetes"),
)


def make_for(paths: Iterable[Path], say: Callable[[str], None]) -> None:
    """Make the builds that the test files `paths` need, each once; call `say` with the name of a
    slow build.

    If several workers of a test run call this, one builds and the others wait for it.
    """
    names = {str(path.relative_to(TESTS)) for path in paths if path.is_relative_to(TESTS)}
    needed = [build for start, build in NEEDS if any(path.startswith(start) for path in names)]
    if not needed:
        return
    toolchain.cache().mkdir(parents=True, exist_ok=True)
    with open(toolchain.cache() / "tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for build in dict.fromkeys(needed):
            module, function = build.split(":")
            began = time.monotonic()
            getattr(importlib.import_module(module), function)()
            if (took_s := time.monotonic() - began) > 5:
                say(f"built in {took_s:.0f} s: {build}")
