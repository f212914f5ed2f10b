"""Runs CoreDNS as the cluster's name server: a deployment in kube-system with the address that
kubelet gives to pods."""

from __future__ import annotations

import json
from typing import Any

from tests.kube_conformance import images
from tests.support.cluster import Cluster

ADDRESS = "10.96.0.10"
NAME, NAMESPACE = "coredns", "kube-system"
# The suite looks for the Service by this `name`.
_LABELS = {"k8s-app": "kube-dns"}
_CONFIGURATION = """\
.:53 {
    errors
    health :8080
    ready :8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        ttl 30
    }
    cache 30
    loadbalance
}
"""


def start(cluster: Cluster, timeout_s: float = 300) -> None:
    """Apply the manifests and wait until CoreDNS is ready. The cluster must have the image
    `images.NAME_SERVER`."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests()})
    cluster.kubectl("apply", "-f", "-", input=text)
    cluster.kubectl(
        "-n", NAMESPACE, "rollout", "status", f"deployment/{NAME}", f"--timeout={timeout_s:.0f}s",
        timeout_s=timeout_s + 10,
    )  # fmt: skip


def manifests() -> list[dict[str, Any]]:
    """Return the manifests: account, permissions, configuration, deployment and Service."""
    own = {"name": NAME, "namespace": NAMESPACE}
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]
    role = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "system:coredns",
    }
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        {"name": "metrics", "port": 9153, "protocol": "TCP"},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": own},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": role["name"]},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": role["name"]},
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **own}],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": own,
            "data": {"Corefile": _CONFIGURATION},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**own, "labels": _LABELS},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": _LABELS}, "spec": _pod()},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": NAMESPACE, "labels": _LABELS},
            "spec": {"clusterIP": ADDRESS, "selector": _LABELS, "ports": ports},
        },
    ]


def _pod() -> dict[str, Any]:
    """Return the pod's template."""
    return {
        "serviceAccountName": NAME,
        "dnsPolicy": "Default",
        # No pod preempts CoreDNS.
        "priorityClassName": "system-cluster-critical",
        # Specs taint nodes.
        "tolerations": [{"operator": "Exists"}],
        "containers": [
            {
                "name": NAME,
                "image": images.NAME_SERVER,
                "args": ["-conf", "/etc/coredns/Corefile"],
                "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 2},
                "livenessProbe": {
                    "httpGet": {"path": "/health", "port": 8080},
                    "initialDelaySeconds": 60,
                    "timeoutSeconds": 10,
                },
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": NAME}}],
    }
