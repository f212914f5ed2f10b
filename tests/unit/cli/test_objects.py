"""Tests Pods with ConfigMaps and Secrets: environments, volumes, missing objects, messages about
probes."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import yaml

from cri_server.cli.manifest.pod_model import PodManifest
from cri_server.cli.manifest.read import parse
from pyrunc.errors import Error

MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "settings"},
    "data": {"COLOUR": "blue", "a.conf": "x = $(COLOUR)\n", "bad=name": "x"},
    "binaryData": {"raw": base64.b64encode(b"\xff\x00").decode()},
}
SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "keys"},
    "type": "Opaque",
    "data": {"password": base64.b64encode(b"pa$$(COLOUR)").decode()},
    "stringData": {"user": "me"},
}


def pod(volumes: Any = (), spec: dict[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    main = {"name": "c", "image": "i", **container}
    metadata = {"name": "p", "labels": {"app": "web"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [main], "volumes": list(volumes), **(spec or {})},
    }


def read(*documents: dict[str, Any]) -> tuple[PodManifest, list[str]]:
    return parse(yaml.safe_dump_all(documents))


def environment(*documents: dict[str, Any]) -> dict[str, str]:
    from cri_server.cli.manifest import expand

    parsed, _ = read(*documents)
    return expand.environment((e.name, e.value) for e in parsed.spec.containers[0].env)


def test_an_environment_combines_all_sources() -> None:
    """A later source replaces variables of an earlier one. `$(NAME)` is expanded in the manifest's
    values, but not in those of ConfigMaps and Secrets."""
    env = [
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "password"}}},
        {"name": "COLOUR", "value": "red"},
        {"name": "BOTH", "value": "$(COLOUR) $(X_user)"},
        {
            "name": "NONE",
            "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "no", "optional": True}},
        },
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
    ]
    sources = [
        {"configMapRef": {"name": "settings"}},
        {"prefix": "X_", "secretRef": {"name": "keys"}},
        {"secretRef": {"name": "nothing", "optional": True}},
    ]
    text_only = {**MAP, "binaryData": {}}
    variables = environment(text_only, SECRET, pod(env=env, envFrom=sources))
    assert variables == {
        "COLOUR": "red",
        "a.conf": "x = $(COLOUR)\n",
        "X_password": "pa$$(COLOUR)",
        "X_user": "me",
        "PASSWORD": "pa$$(COLOUR)",
        "BOTH": "red me",
        "NAME": "p",
        "APP": "web",
    }
    _, messages = read(text_only, pod(envFrom=sources[:1]))
    assert messages == ["spec.containers[0].envFrom[0]: 'bad=name' is not a variable's name"]


def test_volumes_have_the_content_of_their_objects() -> None:
    volumes = [
        {
            "name": "m",
            "configMap": {
                "name": "settings",
                "items": [{"key": "raw", "path": "sub/raw", "mode": 0o600}],
            },
        },
        {"name": "s", "secret": {"secretName": "keys", "defaultMode": 0o400}},
        {"name": "o", "secret": {"secretName": "nothing", "optional": True}},
    ]
    parsed, messages = read(pod(volumes), MAP, SECRET)
    files = {
        v.name: [(f.path, f.content, f.mode) for f in v.files or []] for v in parsed.spec.volumes
    }
    assert files["m"] == [("sub/raw", b"\xff\x00", 0o600)]
    assert sorted(files["s"]) == [("password", b"pa$$(COLOUR)", 0o400), ("user", b"me", 0o400)]
    assert files["o"] == [] and messages == []


def test_a_list_may_contain_config_maps() -> None:
    parsed, _ = parse(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [MAP, pod()]}))
    assert parsed.metadata.name == "p"


def test_probes_are_reported() -> None:
    probe = {"httpGet": {"port": 8080, "path": "/healthz"}, "periodSeconds": 5}
    _, messages = read(
        pod(livenessProbe=probe, readinessProbe={"exec": {"command": ["cat", "/x"]}})
    )
    assert messages == [
        "spec.containers[0].livenessProbe: httpGet :8080/healthz every 5 s: run does not probe",
        "spec.containers[0].readinessProbe: exec cat /x every 10 s: run does not probe",
    ]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            [pod(envFrom=[{"configMapRef": {"name": "x"}}]), MAP],
            "spec.containers[0].envFrom[0].configMapRef: no ConfigMap 'x' in the manifest;"
            " its ConfigMaps are: settings",
        ),
        (
            [
                pod(
                    env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "x"}}}]
                ),
                SECRET,
            ],
            "spec.containers[0].env[0].valueFrom.secretKeyRef: Secret 'keys' has no key 'x'",
        ),
        (
            [pod(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"nam": "x"}}}])],
            "spec.containers[0].env[0].valueFrom.configMapKeyRef: no such field `nam`",
        ),
        (
            [pod(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}])],
            "'status.hostIP' is not supported; supported are metadata.name",
        ),
        (
            [
                pod(
                    [
                        {
                            "name": "v",
                            "downwardAPI": {
                                "items": [{"path": "ip", "fieldRef": {"fieldPath": "status.podIP"}}]
                            },
                        }
                    ]
                )
            ],
            "spec.volumes[0].downwardAPI.items[0].fieldRef.fieldPath:"
            " 'status.podIP' is not supported",
        ),
        (
            [
                pod(
                    [
                        {
                            "name": "v",
                            "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]},
                        }
                    ]
                )
            ],
            "spec.volumes[0].projected.sources[0].serviceAccountToken: is not supported;"
            " supported are configMap, secret, downwardAPI",
        ),
        (
            [
                pod(
                    [
                        {
                            "name": "v",
                            "projected": {
                                "sources": [
                                    {
                                        "configMap": {
                                            "name": "settings",
                                            "items": [{"key": "COLOUR", "path": "../x"}],
                                        }
                                    }
                                ]
                            },
                        }
                    ]
                ),
                MAP,
            ],
            "'../x' is not a path in the volume",
        ),
        (
            [
                pod(
                    env=[
                        {"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.gpu"}}}
                    ]
                )
            ],
            "'limits.gpu' is not supported; supported are limits.cpu",
        ),
        (
            [pod(env=[{"name": "A", "valueFrom": {"fileKeyRef": {}}}])],
            "valueFrom.fileKeyRef: is not supported; supported are configMapKeyRef",
        ),
        (
            [
                pod(
                    env=[
                        {
                            "name": "A",
                            "value": "x",
                            "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                        }
                    ]
                )
            ],
            "has both value and valueFrom",
        ),
        (
            [
                pod(
                    env=[
                        {
                            "name": "A",
                            "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "raw"}},
                        }
                    ]
                ),
                MAP,
            ],
            "the content is not UTF-8 text",
        ),
        (
            [pod([{"name": "v", "configMap": {"name": "x"}}])],
            "spec.volumes[0].configMap: no ConfigMap 'x' in the manifest; its ConfigMaps are: none",
        ),
        (
            [
                pod(
                    [
                        {
                            "name": "v",
                            "configMap": {
                                "name": "settings",
                                "items": [{"key": "raw", "path": "../x"}],
                            },
                        }
                    ]
                ),
                MAP,
            ],
            "'../x' is not a path in the volume",
        ),
        ([pod([{"name": "v", "@files": []}])], "spec.volumes[0].@files: no such field"),
        ([pod(), MAP, MAP], "ConfigMap settings: occurs twice"),
        (
            [pod(), {**MAP, "metadata": {"name": "x", "namespace": "other"}}],
            "'other' is not the namespace of the Pod, 'default'",
        ),
        ([pod(), {**SECRET, "data": {"x": "?"}}], "Secret keys data.x: is not base64"),
        ([pod(), {**SECRET, "data": {"x": "é"}}], "Secret keys data.x: is not base64"),
        ([pod(), {**MAP, "dta": {}}], "ConfigMap settings dta: no such field"),
        (
            [pod(), {**MAP, "data": {"x": 5}}],
            "ConfigMap settings data.x: expected `str`, got `int`",
        ),
        ([pod(), {**MAP, "metadata": {}}], "ConfigMap metadata.name: is required"),
        ([pod(), pod()], "expected one Pod, found 2"),
        ([MAP], "expected one Pod, found 0"),
    ],
)
def test_an_error_has_its_path(documents: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(Error) as caught:
        read(*documents)
    assert message in str(caught.value)


def test_an_environment_may_use_the_downward_api() -> None:
    """Resources are in units of the divisor, rounded up; a missing request counts as the limit."""
    refs = {
        "CPUS": {"resource": "limits.cpu"},
        "MILLI": {"resource": "requests.cpu", "divisor": "1m"},
        "MIB": {"resource": "limits.memory", "divisor": "1Mi"},
    }
    env: list[dict[str, Any]] = [
        {"name": n, "valueFrom": {"resourceFieldRef": ref}} for n, ref in refs.items()
    ]
    env.append({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    variables = environment(
        pod(
            env=env,
            resources={"limits": {"cpu": "1500m", "memory": "64Mi"}},
            spec={"nodeName": "here"},
        )
    )
    assert variables == {"CPUS": "2", "MILLI": "1500", "MIB": "64", "NODE": "here"}


def test_downward_and_projected_volumes_are_written() -> None:
    label = {"path": "all", "fieldRef": {"fieldPath": "metadata.labels"}}
    cpu = {
        "path": "cpu",
        "mode": 0o600,
        "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"},
    }
    sources = [
        {"configMap": {"name": "settings", "items": [{"key": "COLOUR", "path": "a/colour"}]}},
        {"secret": {"name": "keys", "items": [{"key": "user", "path": "user"}]}},
        {"downwardAPI": {"items": [label]}},
    ]
    volumes = [
        {"name": "down", "downwardAPI": {"items": [label, cpu]}},
        {"name": "all", "projected": {"defaultMode": 0o400, "sources": sources}},
    ]
    parsed, _ = read(pod(volumes, resources={"limits": {"cpu": "2"}}), MAP, SECRET)
    files = [[(f.path, f.content, f.mode) for f in v.files or []] for v in parsed.spec.volumes]
    assert files == [
        [("all", b'app="web"', 0o644), ("cpu", b"2000", 0o600)],
        [("a/colour", b"blue", 0o400), ("user", b"me", 0o400), ("all", b'app="web"', 0o400)],
    ]


def test_lenient_leaves_out_only_the_reported_parts() -> None:
    """A variable with an unsupported source is left out. An unsupported volume becomes an empty
    one, so that it can be mounted."""
    env = [{"name": "A", "valueFrom": {"fileKeyRef": {}}}, {"name": "B", "value": "b"}]
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "x"}}]
    text = yaml.safe_dump(
        pod(
            volumes,
            {"hostUsers": False},
            env=env,
            volumeMounts=[{"name": "data", "mountPath": "/data"}],
        )
    )
    parsed, messages = parse(text, lenient=True)
    assert [(e.name, e.value) for e in parsed.spec.containers[0].env] == [("B", "b")]
    assert parsed.spec.volumes[0].empty_dir is not None
    assert messages == [
        (
            "spec.containers[0].env[0].valueFrom.fileKeyRef: is not supported; supported are"
            " configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef"
        ),
        "spec.hostUsers: is not supported",
        "spec.volumes[0].persistentVolumeClaim: is not supported",
    ]
    with pytest.raises(Error, match="no ConfigMap"):
        parse(yaml.safe_dump(pod(envFrom=[{"configMapRef": {"name": "x"}}])), lenient=True)
