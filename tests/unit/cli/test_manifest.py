"""Tests that every field of Kubernetes' Pod in a manifest is supported, refused with its path, or
ignored without effect."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest
import yaml

from cri_server.api import api_pb2 as api
from cri_server.cli.manifest import dns, fields, pod_model, translate
from cri_server.cli.manifest.expand import environment, expand
from cri_server.cli.manifest.read import parse
from pyrunc.errors import InvalidSpec

# The fields of k8s.io/api/core/v1 (and of ObjectMeta), v0.36.3.
KUBERNETES: dict[type, str] = {
    pod_model.PodManifest: "apiVersion kind metadata spec status",
    pod_model.Metadata: """name generateName namespace selfLink uid resourceVersion generation
        creationTimestamp deletionTimestamp deletionGracePeriodSeconds labels annotations
        ownerReferences finalizers managedFields""",
    pod_model.PodSpec: """volumes initContainers containers ephemeralContainers restartPolicy
        terminationGracePeriodSeconds activeDeadlineSeconds dnsPolicy nodeSelector
        serviceAccountName serviceAccount automountServiceAccountToken nodeName hostNetwork
        hostPID hostIPC shareProcessNamespace securityContext imagePullSecrets hostname
        subdomain affinity schedulerName tolerations hostAliases priorityClassName priority
        dnsConfig readinessGates runtimeClassName enableServiceLinks preemptionPolicy overhead
        topologySpreadConstraints setHostnameAsFQDN os hostUsers schedulingGates resourceClaims
        resources hostnameOverride schedulingGroup""",
    pod_model.ContainerManifest: """name image command args workingDir ports envFrom env resources
        resizePolicy restartPolicy restartPolicyRules volumeMounts volumeDevices livenessProbe
        readinessProbe startupProbe lifecycle terminationMessagePath terminationMessagePolicy
        imagePullPolicy securityContext stdin stdinOnce tty""",
    pod_model.ContainerPort: "name hostPort containerPort protocol hostIP",
    pod_model.Env: "name value valueFrom",
    pod_model.VolumeMount: (
        "name readOnly recursiveReadOnly mountPath subPath mountPropagation subPathExpr"
    ),
    pod_model.PodSecurity: """seLinuxOptions windowsOptions runAsUser runAsGroup runAsNonRoot
        supplementalGroups supplementalGroupsPolicy fsGroup sysctls fsGroupChangePolicy
        seccompProfile appArmorProfile seLinuxChangePolicy""",
    pod_model.ContainerSecurity: """capabilities privileged seLinuxOptions windowsOptions runAsUser
        runAsGroup runAsNonRoot readOnlyRootFilesystem allowPrivilegeEscalation procMount
        seccompProfile appArmorProfile""",
    pod_model.Volume: """name hostPath emptyDir gcePersistentDisk awsElasticBlockStore gitRepo
        secret nfs iscsi glusterfs persistentVolumeClaim rbd flexVolume cinder cephfs flocker
        downwardAPI fc azureFile configMap vsphereVolume quobyte azureDisk photonPersistentDisk
        projected portworxVolume scaleIO storageos csi ephemeral image""",
    pod_model.EmptyDir: "medium sizeLimit",
    pod_model.HostPath: "path type",
    pod_model.Resources: "limits requests claims",
    pod_model.PodDnsManifest: "nameservers searches options",
    pod_model.DnsOption: "name value",
    pod_model.ContainerCapabilities: "add drop",
    pod_model.Profile: "type localhostProfile",
    pod_model.Sysctl: "name value",
}

FULL: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p"},
    "spec": {
        "containers": [
            {
                "name": "c",
                "image": "i",
                "env": [{"name": "A", "value": "b"}],
                "ports": [{"containerPort": 80, "name": "http"}],
                "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "500m"}},
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}},
            }
        ],
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/h"}}],
        "securityContext": {"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]},
        "dnsConfig": {"nameservers": ["192.0.2.1"], "options": [{"name": "ndots", "value": "2"}]},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the manifest `FULL` with `value` at a path such as `spec.containers.0.comand`."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(FULL))
    *above, last = path.split(".")
    place: Any = document
    for word in above:
        place = place[int(word)] if isinstance(place, list) else place.setdefault(word, {})
    place[last] = value
    return document


def refusal(document: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        parse(document if isinstance(document, str) else yaml.safe_dump(document))
    return caught.value.message


@pytest.mark.parametrize("kind", KUBERNETES)
def test_all_fields_of_kubernetes_are_known(kind: type[msgspec.Struct]) -> None:
    done = {
        f.encode_name for f in msgspec.structs.fields(kind) if not f.encode_name.startswith("@")
    }
    not_done = set(fields.NOT_DONE.get(kind, {}))
    assert done | not_done == set(KUBERNETES[kind].split()) and not done & not_done


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "spec.containers.0.comand",
            ["x"],
            "spec.containers[0].comand: no such field; did you mean 'command'?",
        ),
        (
            "spec.containers.0.Command",
            ["x"],
            "spec.containers[0].Command: no such field; did you mean 'command'?",
        ),
        ("spec.hostpid", True, "spec.hostpid: no such field; did you mean 'hostPID'?"),
        ("spec.nodename", "n", "spec.nodename: no such field; did you mean 'nodeName'?"),
        ("spec.zebra", 1, "spec.zebra: no such field"),
        ("metadata.label", {}, "metadata.label: no such field; did you mean 'labels'?"),
        ("spec.restartPolicy", "OnFailure", "spec.restartPolicy: is not supported"),
        ("spec.hostUsers", False, "spec.hostUsers: is not supported"),
        ("spec.volumes.0.nfs", {"server": "s"}, "spec.volumes[0].nfs: is not supported"),
        (
            "spec.volumes.0.emptyDir.medium",
            "Memory",
            "spec.volumes[0].emptyDir.medium: is not supported",
        ),
        (
            "spec.containers.0.lifecycle",
            {"preStop": {"sleep": {"seconds": 1}}},
            "spec.containers[0].lifecycle: is not supported",
        ),
        (
            "spec.containers.0.resources.limits.nvidia/gpu",
            1,
            "spec.containers[0].resources.limits.nvidia/gpu: is not supported",
        ),
        (
            "spec.containers.0.resources.limits.hugepages-2Mi",
            "2Mi",
            "spec.containers[0].resources.limits.hugepages-2Mi: is not supported",
        ),
        (
            "spec.containers.0.resources.limits.mem",
            "2Mi",
            "spec.containers[0].resources.limits.mem: no such field; did you mean 'memory'?",
        ),
    ],
)
def test_unsupported_fields_are_refused(path: str, value: Any, message: str) -> None:
    document = changed(path, value)
    assert refusal(document) == f"{message} (--lenient ignores it)"
    assert parse(yaml.safe_dump(document), lenient=True)[1] == [message]


def test_all_problems_are_reported_at_once() -> None:
    document = changed("spec.comand", 1)
    document["metadata"]["nam"] = "x"
    assert len(refusal(document).splitlines()) == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.restartPolicy", "Always"),
        ("spec.restartPolicy", "Never"),
        ("spec.schedulerName", "default-scheduler"),
        ("spec.priority", 1000),
        ("spec.nodeSelector", {"disk": "ssd"}),
        ("spec.serviceAccountName", "builder"),
        ("spec.affinity", {"nodeAffinity": {}}),
        ("spec.tolerations", [{"operator": "Exists"}]),
        ("spec.hostUsers", True),
        ("spec.nodeName", "other"),
        ("spec.volumes", None),
        ("spec.containers.0.command", None),
        ("spec.containers.0.terminationMessagePath", "/dev/termination-log"),
        ("spec.containers.0.securityContext.procMount", "Default"),
        ("spec.securityContext.fsGroupChangePolicy", "OnRootMismatch"),
        ("metadata.creationTimestamp", None),
        ("metadata.resourceVersion", "17"),
        ("status", {"phase": "Running"}),
    ],
)
def test_kubernetes_defaults_and_nulls_are_fine(path: str, value: Any) -> None:
    document = changed(path, value)
    if path == "spec.volumes":
        document["spec"]["containers"][0]["volumeMounts"] = None
    assert parse(yaml.safe_dump(document))[1] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one Pod, found 0"),
        ("[1]", "expected one Pod, found a list"),
        ("just text", "expected one Pod, found a scalar"),
        ("a: 1\n---\nb: 1", "kind: is required"),
        ("a: 1", "kind: is required"),
        (
            "kind: Deployment",
            (
                "kind: run supports only Pod, not Deployment; make a Pod from its template and give"
                " it a name"
            ),
        ),
        ("{kind: List, items: [1, 2]}", "expected one Pod, found a scalar"),
        (
            "{kind: PodList}",
            "kind: run supports only Pod, ConfigMap and Secret, not 'PodList'",
        ),
        (
            "kind: Service",
            "kind: run supports only Pod, ConfigMap and Secret, not 'Service'",
        ),
        ("{kind: Pod, apiVersion: v2}", "apiVersion: 'v2' is not 'v1'"),
        ("{kind: Pod, kind: Pod}", "not YAML: duplicate key 'kind' in line 1"),
        ("{kind: Pod, apiVersion: v1, 1: 2}", "1: the key is not a string"),
        ("{kind: Pod, apiVersion: v1, metadata: &a {labels: *a}}", "an alias contains itself"),
    ],
)
def test_a_manifest_must_have_exactly_one_pod(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100m", "0.1"),
        ("5n", "0.000000005"),
        ("1.5Gi", "1610612736"),
        ("1e3", "1000"),
        ("2E", "2e18"),
    ],
)
def test_quantities_are_parsed(text: str, value: str) -> None:
    assert pod_model.quantity(text, "") == Decimal(value)


def test_a_date_is_text() -> None:
    pod, _ = parse(yaml.safe_dump(FULL).replace("value: b", "value: 2026-01-02"))
    assert pod.spec.containers[0].env[0].value == "2026-01-02"


CONTAINER: dict[str, Any] = FULL["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("metadata.name", "a..b", "metadata.name: 'a..b' is not a pod's name"),
        ("metadata.name", "a" * 254, "is longer than 253 characters"),
        ("metadata.name", "a\n", "metadata.name: 'a\\n' is not a pod's name"),
        ("metadata.namespace", "a/b", "metadata.namespace: 'a/b' is not a namespace"),
        ("metadata.labels", {"a b": ""}, "metadata.labels.a b: 'a b' is not a key"),
        ("metadata.labels", {"a": "b c"}, "metadata.labels.a: 'b c' is not a label's value"),
        ("spec.containers", [], "spec.containers: is empty"),
        ("spec.containers", [CONTAINER, CONTAINER], "spec.containers[1].name: 'c' is used twice"),
        ("spec.initContainers", [CONTAINER], "spec.containers[0].name: 'c' is used twice"),
        ("spec.containers.0.name", "C", "spec.containers[0].name: 'C' is not a container's name"),
        ("spec.containers.0.name", "c" * 64, "is longer than 63 characters"),
        ("spec.containers.0.image", " i", "spec.containers[0].image: ' i' is not an image's name"),
        (
            "spec.containers.0.env.0.name",
            "A=B",
            "spec.containers[0].env[0].name: 'A=B' is not a variable's name",
        ),
        (
            "spec.containers.0.ports.0.containerPort",
            0,
            "spec.containers[0].ports[0].containerPort: 0 is not a port",
        ),
        ("spec.containers.0.ports.0.hostPort", 65536, "ports[0].hostPort: 65536 is not a port"),
        ("spec.containers.0.ports.0.name", "80", "ports[0].name: '80' is not a port's name"),
        ("spec.containers.0.ports.0.hostIP", "::x", "ports[0].hostIP: '::x' is not an IP address"),
        (
            "spec.containers.0.ports",
            [{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}],
            "ports[1].name: 'a' is used twice",
        ),
        (
            "spec.containers.0.ports",
            [{"containerPort": 1, "hostPort": 9}, {"containerPort": 2, "hostPort": 9}],
            "ports[1].hostPort: 9 is used twice",
        ),
        ("spec.volumes.1.name", "v", "spec.volumes[1].name: 'v' is used twice"),
        ("spec.volumes.1.name", "../v", "spec.volumes[1].name: '../v' is not a volume's name"),
        (
            "spec.volumes.1.emptyDir",
            {},
            "spec.volumes[1]: expected one of hostPath, emptyDir, configMap, secret, downwardAPI"
            " and projected",
        ),
        (
            "spec.volumes.1.hostPath.path",
            "/a/../b",
            "spec.volumes[1].hostPath.path: '/a/../b' contains '..'",
        ),
        ("spec.volumes.1.hostPath.path", "a", "spec.volumes[1].hostPath.path: 'a' is not absolute"),
        (
            "spec.volumes.1.hostPath.type",
            "Folder",
            "spec.volumes[1].hostPath.type: invalid enum value 'Folder'",
        ),
        ("spec.containers.0.volumeMounts.0.mountPath", "/a:b", "mountPath: '/a:b' contains ':'"),
        (
            "spec.containers.0.volumeMounts",
            [{"name": "v", "mountPath": "/a"}, {"name": "h", "mountPath": "/a/"}],
            "volumeMounts[1].mountPath: '/a' is mounted over twice",
        ),
        (
            "spec.containers.0.volumeMounts.0.mountPropagation",
            "Bidirectional",
            "mountPropagation: Bidirectional needs a privileged container",
        ),
        (
            "spec.containers.0.volumeMounts.0.recursiveReadOnly",
            "Enabled",
            "recursiveReadOnly: needs readOnly",
        ),
        (
            "spec.containers.0.resources.requests.cpu",
            2,
            "requests.cpu: 2 is more than the limit of 1",
        ),
        (
            "spec.containers.0.securityContext",
            {"privileged": True, "allowPrivilegeEscalation": False},
            "cannot be false for a privileged container",
        ),
        (
            "spec.containers.0.securityContext.runAsUser",
            -1,
            "securityContext.runAsUser: -1 is not in 0..2147483647",
        ),
        (
            "spec.securityContext.seccompProfile",
            {"type": "Localhost"},
            "seccompProfile.localhostProfile: is required with type Localhost",
        ),
        ("spec.securityContext.sysctls.0.name", "../x", "sysctls[0].name: '../x' is not a sysctl"),
        ("spec.hostname", "a.b", "spec.hostname: 'a.b' is not a host's name"),
        (
            "spec.dnsConfig.nameservers",
            ["x"],
            "spec.dnsConfig.nameservers[0]: 'x' is not an IP address",
        ),
        (
            "spec.terminationGracePeriodSeconds",
            -1,
            "spec.terminationGracePeriodSeconds: -1 is not in 0..2147483647",
        ),
        (
            "spec.terminationGracePeriodSeconds",
            10**12,
            "spec.terminationGracePeriodSeconds: 1000000000000 is not in 0..",
        ),
        ("spec.containers.0.resources.limits.memory", "10E", "limits.memory: '10E' is too large"),
        ("spec.containers.0.resources.limits.memory", "1e30", "limits.memory: '1e30' is too large"),
        (
            "spec.containers.0.resources.limits.memory",
            "-1",
            "limits.memory: '-1' is not a quantity",
        ),
        ("spec.containers.0.resources.limits.cpu", "1E", "limits.cpu: '1E' is too large"),
        (
            "spec.containers.0.command",
            ["\ud800"],
            "spec.containers[0].command[0]: '\\ud800' has a character that UTF-8 cannot encode",
        ),
        ("spec.dnsPolicy", "Nine", "spec.dnsPolicy: invalid enum value 'Nine'"),
    ],
)
def test_values_that_break_a_rule_are_refused(path: str, value: Any, message: str) -> None:
    assert message in refusal(changed(path, value))


def test_references_are_expanded_as_kubelet_does() -> None:
    values = environment([("A", "1"), ("B", "$(A)$(C)"), ("C", "$$(A)"), ("A", "2$(A)")])
    assert values == {"A": "21", "B": "1$(C)", "C": "$(A)"}
    assert expand("$(A) $(NOT) $$(A) $ $A $(A $$", values) == "21 $(NOT) $(A) $ $A $(A $"


def test_dns_config_is_added_to_the_hosts() -> None:
    text = "# resolver\nsearch old\nsearch a b\nnameserver 192.0.2.9\noptions ndots:1 rotate\n"
    assert dns.host(text) == (["192.0.2.9"], ["a", "b"], {"ndots": "1", "rotate": ""})
    dns_config = pod_model.PodDnsManifest(
        nameservers=["192.0.2.1"], options=[pod_model.DnsOption("ndots", "2")]
    )
    assert dns.config(dns_config, own=True) == api.DNSConfig(
        servers=["192.0.2.1"], options=["ndots:2"]
    )


@pytest.mark.parametrize(
    ("security", "image", "expected"),
    [
        ({}, {"uid": 7}, (None, "", None)),
        ({"runAsUser": 5}, {"uid": 7}, (5, "", None)),
        ({"runAsGroup": 6}, {"uid": 7}, (7, "", 6)),
        ({"runAsGroup": 6}, {"username": "www"}, (None, "www", 6)),
        ({"runAsNonRoot": True}, {"uid": 7}, (None, "", None)),
        ({"runAsNonRoot": True, "runAsUser": 5}, {"uid": 0}, (5, "", None)),
        ({"runAsNonRoot": True}, {"uid": 0}, "would run as root"),
        ({"runAsNonRoot": True, "runAsUser": 0}, {"uid": 7}, "would run as root"),
        ({"runAsNonRoot": True}, {"username": "www"}, "'www' is a name"),
    ],
)
def test_a_container_runs_as_the_user_of_manifest_or_image(
    security: dict[str, Any], image: dict[str, Any], expected: Any, tmp_path: Any
) -> None:
    pod, _ = parse(yaml.safe_dump(changed("spec.securityContext", security)))
    api_image = api.Image(username=image.get("username", ""))
    if "uid" in image:
        api_image.uid.value = image["uid"]
    if isinstance(expected, str):
        with pytest.raises(InvalidSpec, match=expected):
            translate.container(pod, pod.spec.containers[0], api_image, tmp_path)
        return
    target = translate.container(
        pod, pod.spec.containers[0], api_image, tmp_path
    ).linux.security_context
    user = target.run_as_user.value if target.HasField("run_as_user") else None
    group = target.run_as_group.value if target.HasField("run_as_group") else None
    assert (user, target.run_as_username, group) == expected
