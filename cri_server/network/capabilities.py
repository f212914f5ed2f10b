"""Converts a pod's requests to the capability arguments and CNI_ARGS of plugins (CNI conventions,
kubelet's annotations)."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from cni_plugins.protocol.call import format_arguments
from cni_plugins.protocol.errors import CniError
from cri_server.network.model import PodNetwork
from pyrunc.errors import InvalidArgument

_ANNOTATIONS = {
    "ingress": "kubernetes.io/ingress-bandwidth",
    "egress": "kubernetes.io/egress-bandwidth",
}
# The grammar of Kubernetes (apimachinery, pkg/api/resource/quantity.go), without a sign.
_QUANTITY = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)\Z"
)
_SUFFIXES = {
    "n": "1e-9",
    "u": "1e-6",
    "m": "1e-3",
    "k": "1e3",
    "M": "1e6",
    "G": "1e9",
    "T": "1e12",
    "P": "1e15",
    "E": "1e18",
}
# The limits of kubelet's own check (pkg/util/bandwidth, validateBandwidthIsReasonable).
_LOWEST_RATE, _HIGHEST_RATE = 1_000, 10**15
_BURST = (1 << 32) - 1
"""The burst size of every bandwidth limit, in bits. It is the largest one that the bandwidth plugin
accepts, because the annotations do not limit bursts."""


def capability_arguments(pod: PodNetwork, pod_ranges: tuple[str, ...]) -> dict[str, Any]:
    """Return the value of every CNI capability that the server offers for the pod. A plugin gets
    those that its configuration lists. Raises InvalidArgument for a malformed bandwidth
    annotation."""
    capabilities: dict[str, Any] = {
        "portMappings": [
            {
                "hostPort": m.host_port,
                "containerPort": m.container_port,
                "protocol": m.protocol,
                "hostIP": m.host_ip,
            }
            for m in pod.port_mappings
            # kubelet also sends a container's ports without a host port, as 0.
            if m.host_port > 0
        ],
        "io.kubernetes.cri.pod-annotations": dict(pod.annotations),
        "bandwidth": bandwidth_of(pod.annotations),
        "dns": pod.dns,
        "cgroupPath": pod.cgroup_path,
        **node_capabilities(pod_ranges),
    }
    return {name: value for name, value in capabilities.items() if value}


def node_capabilities(pod_ranges: tuple[str, ...]) -> dict[str, Any]:
    """Return the capabilities that are the same for all pods of the node: ipRanges, with the pod
    CIDRs from kubelet."""
    return {"ipRanges": [[{"subnet": subnet}] for subnet in pod_ranges]} if pod_ranges else {}


def cni_arguments(pod: PodNetwork) -> tuple[tuple[str, str], ...]:
    """Return the (key, value) pairs of CNI_ARGS for a pod. Raises InvalidArgument for a value with
    a `;` or `=`, which separate the pairs and cannot be escaped."""
    pairs = (
        # Without it a plugin in Go fails at the first key that it does not know (types.LoadArgs).
        ("IgnoreUnknown", "1"),
        ("K8S_POD_NAMESPACE", pod.namespace),
        ("K8S_POD_NAME", pod.name),
        ("K8S_POD_INFRA_CONTAINER_ID", pod.sandbox_id),
        ("K8S_POD_UID", pod.uid),
    )
    try:
        format_arguments(pairs)
    except CniError as error:
        raise InvalidArgument(error.message) from None
    return pairs


def bandwidth_of(annotations: dict[str, str]) -> dict[str, int]:
    """Return the capability `bandwidth` for the limits in a pod's annotations: rates in bits per
    second, bursts in bits, 0 for no limit. Empty without such annotations. Raises InvalidArgument
    for a value that is no Kubernetes quantity, or is not between 1k and 1P."""
    limits: dict[str, int] = {}
    for direction, key in _ANNOTATIONS.items():
        rate = _rate(annotations[key], key) if annotations.get(key) else 0
        limits[f"{direction}Rate"] = rate
        limits[f"{direction}Burst"] = _BURST if rate else 0
    return limits if any(limits.values()) else {}


def _rate(text: str, key: str) -> int:
    # The limit on the length keeps the arithmetic small; Decimal keeps 0.1G exact.
    match = _QUANTITY.match(text) if len(text) < 40 else None
    if match is None:
        raise InvalidArgument(f"annotation {key}: {text[:40]!r} is not a quantity")
    number, exponent, suffix = match.groups()
    value = Decimal(number)
    if exponent:
        value *= Decimal(f"1{exponent}")
    elif suffix and suffix.endswith("i"):
        value *= 1024 ** ("KMGTPE".index(suffix[0]) + 1)
    elif suffix:
        value *= Decimal(_SUFFIXES[suffix])
    if not _LOWEST_RATE <= value <= _HIGHEST_RATE:
        raise InvalidArgument(f"annotation {key}: {text} is not between 1k and 1P")
    return int(value)
